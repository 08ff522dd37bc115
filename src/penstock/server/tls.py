"""The certificate of the server.

Owns: `TlsFiles`, the files that the operator names, and `tls_context`, which reads them. TLS 1.2 is the oldest version.
"""

import ssl

import msgspec

from penstock.words.errors import InvalidRequest


class TlsFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files in PEM format. All empty: the server speaks plain HTTP."""

    cert: str = ""
    """The server's certificate, followed by those of the authorities between it and the root."""
    key: str = ""
    """The certificate's private key, not encrypted. Empty: it is in the file of the certificate."""
    client_ca: str = ""
    """Certificates of authorities: every client must have a certificate of one of them. Empty: it needs none."""


def check_tls(files: TlsFiles) -> None:
    """Raise InvalidRequest when files are missing that others need."""
    if not files.cert and (files.key or files.client_ca):
        raise InvalidRequest("tls.cert is missing; name the file of the certificate, or leave out the others of tls")


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """A context with the files as they are now. InvalidRequest, naming the file, when one cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key or None, _no_password)
    except (OSError, ValueError) as error:  # errors of ssl are OSErrors
        if files.key or not isinstance(error, ssl.SSLError):
            with_key = f" with its key {files.key!r}" if files.key else ""
            raise InvalidRequest(f"the certificate {files.cert!r}{with_key} cannot be used ({_reason(error)}); fix the files") from error
        what = f"the certificate {files.cert!r} cannot be used, or its private key is not in that file ({_reason(error)})"
        raise InvalidRequest(f"{what}; fix the file, or name the file of the key as tls.key") from error
    if files.client_ca:
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the client CA {files.client_ca!r} cannot be used ({_reason(error)}); fix the file") from error
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_TICKET  # a resumed session would not check the certificate again
        context.num_tickets = 0
    return context


def _no_password() -> str:
    """Called for an encrypted key. Without this, OpenSSL would ask on the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    found = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(found).lower().replace("_", " ")
