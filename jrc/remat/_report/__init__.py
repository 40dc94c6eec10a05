"""What a gradient saves, recomputes and needs: the report of `jrc.explain`."""
