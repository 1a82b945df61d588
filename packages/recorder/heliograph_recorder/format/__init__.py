"""Read and write recordings."""
