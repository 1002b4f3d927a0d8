"""Signs the few S3 requests of a ready check (AWS Signature Version 4).

Owns just that: no retries, no streaming, no listing. The S3 client of Tierlog is its adapter's.
"""

import hashlib
import hmac
from datetime import UTC, datetime
from typing import Final

REGION: Final = "us-east-1"
SIGNED: Final = "host;x-amz-content-sha256;x-amz-date"


def sign(
    method: str, host: str, path: str, body: bytes, access_key: str, secret_key: str
) -> dict[str, str]:
    """Return the headers that authorise a request without a query."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    lines = [method, path, "", f"host:{host}", f"x-amz-content-sha256:{digest}"]
    canonical = "\n".join([*lines, f"x-amz-date:{now}", "", SIGNED, digest])
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashed}"
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={access_key}/{scope}"
    authorization = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={SIGNED}, Signature={signature}"
    return {"Authorization": authorization, "x-amz-content-sha256": digest, "x-amz-date": now}
