"""The table of bad input: one line a class, with the number of cases it must have at least.

99 classes in ten areas. A generator yields ``(label, check)``: what is wrong, and a call that raises
``AssertionError`` where the answer, the bucket or the log is not as promised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.security import cases_body as body
from tests.security import cases_cloud as cloud
from tests.security import cases_identity as who
from tests.security import cases_meaning as meaning
from tests.security import cases_store as store
from tests.security import cases_text as text
from tests.security.cases_identity import Cases
from tests.security.site import Site


@dataclass(frozen=True)
class Row:
    area: str
    name: str
    least: int
    cases: Callable[[Site], Cases]


TABLE = (
    Row("identity", "no token", 5, who.no_token),
    Row("identity", "malformed JWT", 20, who.malformed),
    Row("identity", "alg none, HS256 confusion", 10, who.confused),
    Row("identity", "wrong aud", 10, who.wrong_audience),
    Row("identity", "wrong iss", 5, who.wrong_issuer),
    Row("identity", "expired, not yet valid, skew edge", 15, who.times),
    Row("identity", "signature-removed marker", 10, who.marker),
    Row("identity", "key id unknown or rotated", 10, who.key_ids),
    Row("identity", "other project or account", 15, who.other_account),
    Row("identity", "other VM's node", 40, who.other_rank),
    Row("identity", "superseded attempt", 20, who.superseded),
    Row("identity", "right name, other instance id", 20, who.impostor),
    Row("identity", "AWS human session named i-...", 15, who.human_session),
    Row("identity", "two Authorization headers", 15, who.two_headers),
    Row("envelope", "empty", 20, body.empty),
    Row("envelope", "more than 16 KB", 20, body.too_large),
    Row("envelope", "10 MB stream", 20, body.stream),
    Row("envelope", "gzip bomb", 20, body.bombs),
    Row("envelope", "wrong content type", 20, body.content_types),
    Row("envelope", "invalid UTF-8", 20, body.not_utf8),
    Row("envelope", "duplicate keys", 20, body.duplicates),
    Row("envelope", "depth 10^4", 20, body.deep),
    Row("envelope", "truncated", 20, body.truncated),
    Row("schema", "missing", 30, body.missing),
    Row("schema", "extra", 30, body.extra),
    Row("schema", "wrong type", 30, body.wrong_type),
    Row("schema", "negative", 30, body.negative),
    Row("schema", "2^63", 30, body.huge),
    Row("schema", "1e400", 30, body.overflow),
    Row("schema", "NaN", 30, body.not_a_number),
    Row("schema", "bool as int", 30, body.bools),
    Row("schema", "homoglyph keys", 30, body.homoglyphs),
    Row("schema", "unknown version", 30, body.versions),
    Row("meaning", "node >= want", 34, meaning.rank_too_high),
    Row("meaning", "node of another job", 34, meaning.rank_of_another),
    Row("meaning", "job unknown or tombstoned", 34, meaning.unknown_job),
    Row("meaning", "attempt future or past", 34, meaning.attempts),
    Row("meaning", "generation future or past", 34, meaning.generations),
    Row("meaning", "exit for a node never ready", 34, meaning.never_ready),
    Row("meaning", "success from 1 of N", 34, meaning.lone_success),
    Row("meaning", "time travel of a year", 34, meaning.time_travel),
    Row("meaning", "replay x1000", 34, meaning.replays),
    Row("meaning", "reordered hello and exit", 34, meaning.reordered),
    Row("meaning", "contradictory facts", 34, meaning.contradictions),
    Row("meaning", "1,000 jobs of one VM", 34, meaning.many_jobs),
    Row("cloud events", "unknown source", 15, meaning.unknown_source),
    Row("cloud events", "foreign account", 15, meaning.foreign_account),
    Row("cloud events", "foreign instance", 15, meaning.foreign_instance),
    Row("cloud events", "duplicate id", 15, meaning.duplicate_event),
    Row("cloud events", "24 h late", 15, meaning.late_event),
    Row("cloud events", "batch of 100", 15, meaning.batches),
    Row("cloud events", "malformed audit log", 15, meaning.malformed_log),
    Row("cloud events", "SNS subscription confirm", 15, meaning.subscription_confirm),
    Row("config and templates", "$(..)", 30, text.substitution),
    Row("config and templates", "backticks", 30, text.backticks),
    Row("config and templates", ";", 30, text.semicolon),
    Row("config and templates", "newline", 30, text.newline),
    Row("config and templates", "quote breaks", 30, text.quotes),
    Row("config and templates", "{{7*7}}", 30, text.braces),
    Row("config and templates", "{% %}", 30, text.blocks),
    Row("config and templates", "%n specifiers", 30, text.percent),
    Row("config and templates", "../", 30, text.parents),
    Row("config and templates", "leading -", 30, text.dash),
    Row("config and templates", "NUL", 30, text.nul),
    Row("config and templates", "64 KB env", 30, text.long_env),
    Row("network", "master = 169.254.169.254", 12, text.link_local),
    Row("network", "loopback", 12, text.loopback),
    Row("network", "IPv6-mapped", 12, text.mapped),
    Row("network", "decimal IP", 12, text.decimal),
    Row("network", "DNS rebinding name", 12, text.rebinding),
    Row("network", "redirect from the bucket", 12, text.redirects),
    Row("network", "userinfo URL", 12, text.userinfo),
    Row("network", "port 0 and 65536", 12, text.ports),
    Row("logs", "CRLF forge", 10, text.crlf),
    Row("logs", "ANSI", 10, text.ansi),
    Row("logs", "U+2028", 10, text.separators),
    Row("logs", "JWT", 10, text.jwts),
    Row("logs", "key", 10, text.keys),
    Row("logs", "PEM", 10, text.pems),
    Row("logs", "signed URL", 10, text.signed),
    Row("logs", "1 MB field", 10, text.huge_field),
    Row("cloud replies", "409 own or foreign", 30, cloud.exists),
    Row("cloud replies", "operation error after 200", 30, cloud.failed_operation),
    Row("cloud replies", "partial list", 30, cloud.partial),
    Row("cloud replies", "empty list with 200", 30, cloud.empty_list),
    Row("cloud replies", "stale list", 30, cloud.stale_list),
    Row("cloud replies", "dead token", 30, cloud.dead_token),
    Row("cloud replies", "parameter mismatch", 30, cloud.mismatch),
    Row("cloud replies", "403 quota or 403 IAM", 30, cloud.forbidden),
    Row("cloud replies", "HTML 502", 30, cloud.proxy_page),
    Row("cloud replies", "slow-loris", 30, cloud.slow_loris),
    Row("cloud replies", "clock off by hours", 30, cloud.wrong_clock),
    Row("store", "412 for an own write", 20, store.own_write),
    Row("store", "409", 20, store.raced),
    Row("store", "429 burst", 20, store.throttled),
    Row("store", "torn read", 20, store.torn),
    Row("store", "record of a future version", 20, store.future),
    Row("store", "corrupt JSON", 20, store.corrupt),
    Row("store", "record deleted by hand", 20, store.deleted),
)
