"""Measurements: on what machine they were made, kept between commands, recorded, shown."""
