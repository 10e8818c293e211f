"""The trained modules that families are built from, and the frames they share."""
