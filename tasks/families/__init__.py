"""Model families, one table each: how every tensor is cut over model-parallel parts."""
