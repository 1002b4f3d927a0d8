"""A Java trust store with the certificate authorities that Python trusts.

Owns the bytes of a JKS file that holds certificates only. A packaged Java knows the public
authorities and none of the machine's own, so that a download through a company's proxy fails
where Python's succeeds.

Byte table (all integers big-endian, text as length16 + UTF-8):

    offset  size  field
         0     4  magic 0xFEEDFEED
         4     4  version 2
         8     4  number of entries, then for each entry:
                  4  tag 2, a trusted certificate
                  t  alias, unique
                  8  creation time in ms, 0 here
                  t  certificate type "X.509"
                  4  length of the certificate, then its DER bytes
       end    20  SHA-1 of: password as UTF-16BE, "Mighty Aphrodite", all bytes before
"""

import hashlib
import ssl
import struct
from collections.abc import Sequence
from typing import Final

PASSWORD: Final = "changeit"  # noqa: S105 - Java's own default; the file holds no secret


def python_authorities() -> list[bytes]:
    """Return the authorities that Python trusts here, as DER (SSL_CERT_FILE counts)."""
    return ssl.create_default_context().get_ca_certs(binary_form=True)


def trust_store(certificates: Sequence[bytes]) -> bytes:
    """Lay out a JKS file."""
    parts = [struct.pack(">III", 0xFEEDFEED, 2, len(certificates))]
    for number, certificate in enumerate(certificates):
        parts += [
            struct.pack(">I", 2),
            _text(f"authority-{number}"),
            struct.pack(">Q", 0),
            _text("X.509"),
            struct.pack(">I", len(certificate)),
            certificate,
        ]
    body = b"".join(parts)
    salted = PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + body
    return body + hashlib.sha1(salted).digest()  # noqa: S324 - the format's own digest


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">H", len(encoded)) + encoded
