"""Models with recurrent layers: states in slots, and how a tree is read from one of them."""
