"""Network: whole optimizer steps of several processes over slow links."""
