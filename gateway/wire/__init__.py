"""Wire formats: encoding and decoding for the server's protocols and the remote backends."""
