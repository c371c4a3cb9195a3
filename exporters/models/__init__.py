"""Models of this project, by family; ``registry`` lists their names."""
