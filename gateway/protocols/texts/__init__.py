"""The dialects of text models: OpenAI's, Text Embeddings Inference's and Cohere's.

Each is a table of routes. Their requests name a model, or mean the only one that fits.
"""
