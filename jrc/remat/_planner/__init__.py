"""Which values to save within a byte budget. Files are listed in docs/architecture.md."""
