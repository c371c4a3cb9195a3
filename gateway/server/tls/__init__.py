"""TLS on the listeners: certificates, and the transport of an encrypted connection."""
