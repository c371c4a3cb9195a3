"""The benchmark beside other servers."""
