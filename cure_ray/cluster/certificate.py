"""The certificate of an embedded session: whoever does not hold its key cannot even begin to speak with the session's gRPC servers.

A token alone is not enough on a shared machine: Ray sends it in the clear to whoever listens on a port it knows, and some of its calls
fail hard before they look for it.
"""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 3650  # longer than any session; it dies with the session's directory


def write_certificate(directory: Path) -> dict[str, str]:
    """A new key and its self-signed certificate for 127.0.0.1, and what Ray has to be told to demand it of both sides."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "embedded cure_ray session")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = directory / "certificate.pem", directory / "key.pem"
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_secret(private, plain)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(public),
        "RAY_TLS_SERVER_KEY": str(private),
        "RAY_TLS_CA_CERT": str(public),
    }


def write_secret(path: Path, secret: bytes) -> None:
    """A new file that is never, not even at first, readable by others."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
