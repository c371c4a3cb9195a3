"""One module per command; each measures or decides, and prints or writes the result."""
