"""What an accelerator is wanted for, in one run of a few minutes."""
