"""Files as raw records: streams, JSON, tables, data sets of the hub, their splits."""
