"""From a trained model to a proven, published version: formats, proofs, conversion, migration."""
