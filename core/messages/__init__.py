"""What people read: tables, claims, install commands, and strings of others made printable."""
