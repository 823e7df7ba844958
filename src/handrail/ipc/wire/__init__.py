"""The connection between two processes: frames, operations, the handshake, and the socket of the lease holder."""
