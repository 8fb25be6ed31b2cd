"""The built-in dashboard: an operator sees everyone, a tenant itself."""
