"""The ACP agent: Handrail's own loop in an editor, over the Agent Client Protocol (https://agentclientprotocol.com)."""
