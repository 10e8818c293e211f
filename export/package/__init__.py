"""Our own package: manifest, card, checks; written whole or not at all, found and loaded."""
