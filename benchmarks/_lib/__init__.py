"""What all benchmarks share: command line, platform, report file, tables, pictures, timing."""
