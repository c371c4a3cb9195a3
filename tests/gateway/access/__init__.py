"""Access: identity, rules, and every route under them."""
