"""String formats as regular expressions (rewritten dialect, whole string).

Each accepts only strings that its standard accepts; where a standard is no regular language or has rare forms, less:
no leap seconds, no quoted local parts or address literals in email, no zone in ipv6, no punycode labels in hostname.
"""

_DAY = "(?:0[1-9]|[12][0-9]|3[01])"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-{_DAY}|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_OCTET}\\.){{3}}{_OCTET}"
_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = (
    "(?:"
    + "|".join(
        [
            f"(?:{_H16}:){{6}}{_LS32}",
            f"::(?:{_H16}:){{5}}{_LS32}",
            f"(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}",
            f"(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}",
            f"(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}",
            f"(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
            f"(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}",
            f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
            f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
        ]
    )
    + ")"
)
_ALNUM = "[a-zA-Z0-9]"
# Labels of 1 to 63 characters without two hyphens in places 3 and 4 (those are reserved for punycode).
_LABEL = f"(?:{_ALNUM}(?:{_ALNUM}|-{_ALNUM}){{0,30}})"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,3}}"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~\\-]"
_EMAIL = f"{_ATOM}{{1,20}}(?:\\.{_ATOM}{{1,20}}){{0,2}}@{_HOST}"
_UNRESERVED = "[a-zA-Z0-9\\-._~!$&'()*+,;=]"
_PCHAR = f"(?:[a-zA-Z0-9\\-._~!$&'()*+,;=:@]|%{_HEX}{{2}})"
_REG_NAME = f"(?:{_UNRESERVED}|%{_HEX}{{2}})*"
_USER = f"(?:[a-zA-Z0-9\\-._~!$&'()*+,;=:]|%{_HEX}{{2}})*@"
_AUTHORITY = f"(?:{_USER})?(?:\\[{_IPV6}\\]|{_REG_NAME})(?::[0-9]*)?"
_PATH = f"(?:/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*)?"
_TAIL = f"(?:\\?(?:{_PCHAR}|[/?])*)?(?:\\#(?:{_PCHAR}|[/?])*)?"
_URI = f"[a-zA-Z][a-zA-Z0-9+\\-.]*:(?://{_AUTHORITY}(?:/{_PCHAR}*)*|{_PATH}){_TAIL}"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P(?:{_CALENDAR}(?:T{_CLOCK})?|T{_CLOCK}|[0-9]+W)",
    "email": _EMAIL,
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _URI,
}
