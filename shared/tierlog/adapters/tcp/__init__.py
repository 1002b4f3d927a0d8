"""The transport port over TCP or TLS, on asyncio's BufferedProtocol."""

from tierlog.adapters.tcp.transport import TcpLimits, TcpTransport

__all__ = ["TcpLimits", "TcpTransport"]
