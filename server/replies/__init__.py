"""What goes back: the parts of an answer, in the API's shapes, whole or as a stream."""
