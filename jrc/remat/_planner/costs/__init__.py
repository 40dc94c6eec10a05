"""What each equation costs, in bytes and FLOPs, and what compilers make of programs."""
