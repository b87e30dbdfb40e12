"""Models of the world around the production code, explored exhaustively and at random."""
