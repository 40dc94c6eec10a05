"""PyTorch: its recomputation compared with that of jrc on the same model."""
