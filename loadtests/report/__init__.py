"""Reports of load tests, comparisons and gates: terminal, HTML, Markdown, JUnit."""
