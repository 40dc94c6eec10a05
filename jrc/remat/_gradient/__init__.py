"""The differentiated function: its arguments, its residuals, its compiled memory."""
