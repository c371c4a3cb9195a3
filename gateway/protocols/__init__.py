"""Dialects: what clients send and receive, decoded into requests and encoded from responses.

To add one, write a module or folder here, and its descriptor: built in, in ``dialects``; in a
package of its own, as entry point ``modelport.dialects``.
"""
