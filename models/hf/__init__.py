"""Models of transformers behind the one interface: built, read, probed and run in rounds."""
