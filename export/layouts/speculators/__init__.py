"""The speculators format, one module per family: how its drafter is laid out, and by which reader
what was written is judged. `export.formats.speculators` lists them."""
