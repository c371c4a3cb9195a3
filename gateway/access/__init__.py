"""Access: authentication, authorisation on (principal, operation, model), quotas and audit."""
