"""Servers for coding agents (MCP) and editors (language server protocol)."""
