r"""Finding the final answer in a completion, and comparing two answers exactly.

Numbers are compared as fractions, without a tolerance: 3, 3.0 and 3.00 are one, 1000000 and 1000000.00005 are two.
Scientific notation (1e-5, 3 × 10^8, 10^{-5}) and Unicode's forms of digits, signs and fractions are read as the numbers
they are. A completion may be anything that a model can emit, so nothing here raises on any text and every step is
linear in a text of bounded length.

    extract_gsm8k_answer("so she pays 3 * 6 = $18.00.\n#### 18")  # "18"
    extract_gsm8k_answer(r"hence \boxed{\frac{36}{2} \text{ eggs}}")  # "18"
    same_answer(r"\frac{1}{2}", "0.5")  # True
"""

import logging
import math
import re
import unicodedata
from collections import deque
from fractions import Fraction

# An answer stands at the end of a completion: what comes before its last MAX_TEXT characters is not looked at.
MAX_TEXT = 20_000
# Longer numbers are no answers (and Python itself refuses to read integers of more than 4300 digits).
MAX_DIGITS = 100
# Bounds on what goes through sympy, whose time grows without limit in size, depth and degree. See `_tame`.
MAX_EXPRESSION, MAX_DEPTH, MAX_VARIABLES, MAX_DEGREE, MAX_EXPONENT = 120, 5, 3, 12, 1000

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?<![\w^])(?<!\d\.)(?<!\^\{{)(?<!\^-)(?<!\^\{{-)  # in no word (x2), decimal, exponent (m^2)
    (?P<sign>(?<![\w)\]}}])-)?         # a sign, not the minus of 20-3
    (?:
      (?P<whole>\d+)?[ ]?\\[dt]?frac[ ]?
        (?:\{{[ ]?(?P<top>-?(?:{_DIGITS}))[ ]?\}}[ ]?\{{[ ]?(?P<bottom>-?(?:{_DIGITS}))[ ]?\}}
        |(?P<top1>\d)(?P<bottom1>\d))
      |(?:(?P<number>{_DIGITS})[ ]?(?:\\times|\\cdot|[×⋅·*x])[ ]?)?10[ ]?\^[ ]?  # 3 \times 10^{{-5}}, or 10^5 alone
        (?:\{{[ ]?(?P<braced>[+-]?\d+)[ ]?\}}|(?P<power>[+-]?\d+))(?![\w^])
      |(?P<mantissa>{_DIGITS})[eE](?P<exponent>[+-]?\d+)(?!\w|\.\d)
      |(?P<plain>{_DIGITS})(?:[ ]?/[ ]?(?P<over>{_DIGITS}))?
    )""",
    re.ASCII | re.VERBOSE,
)
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|[{}]", re.DOTALL)
# What models, tokenizers and people write for ASCII: four minus signs, full-width forms, fractions in one character.
_ASCII = str.maketrans(
    dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-")
    | {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F) if chr(code) != "-"}
    | {c: r"\frac{" + unicodedata.normalize("NFKC", c).replace("\u2044", "}{") + "}" for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"}
    | {"\u2044": "/", "\u2215": "/"}
)
_RAISED = re.compile("[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_FROM_RAISED = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_SPACED = re.compile(r"(?<!\d)\d{1,3}(?:[\u00a0\u2007\u2009\u202f]\d{3})+(?!\d)", re.ASCII)  # 1 000 000, by thin spaces
_LATEX_SPACE = re.compile(r"\\[,!;: ]")
_SIGNED_CURRENCY, _CURRENCY = re.compile(r"-\\?[$€£¥]"), re.compile(r"\\?[$€£¥]|\*\*")
_UNIT = re.compile(
    r" ?(?:\\?%|\\(?:text|mathrm|mbox) ?\{[^{}]*\}(?: ?\^ ?(?:\d|\{\d\}))?|\^ ?(?:\\circ|\{\\circ\}))? ?\.? ?"
)


# ---- Numbers ----


def _ascii(text: str) -> str:
    """`text` with Unicode's forms of digits, signs, fractions and exponents written in ASCII."""
    text = _RAISED.sub(lambda raised: f"^{{{raised[0].translate(_FROM_RAISED)}}}", text.translate(_ASCII))
    return _SPACED.sub(lambda number: "".join(re.findall(r"\d", number[0])), text)


def _plain(text: str) -> str:
    r"""`text` in ASCII, without what stands around digits in LaTeX, Markdown and money: `\,`, `{,}`, `$`, `**`.

    Runs of whitespace become one space, so that no pattern here can take quadratic time over them.
    """
    text = _LATEX_SPACE.sub("", _ascii(text)).replace("{,}", ",")
    return re.sub(r"\s+", " ", _CURRENCY.sub(" ", _SIGNED_CURRENCY.sub("-", text)))


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER`; None over a zero denominator or beyond MAX_DIGITS."""
    part = match.groupdict()
    top = part["number"] or part["mantissa"] or part["plain"] or part["top"] or part["top1"] or "1"
    bottom = part["over"] or part["bottom"] or part["bottom1"] or "1"
    power = part["braced"] or part["power"] or part["exponent"] or "0"
    if max(map(len, (top, bottom, power, part["whole"] or ""))) > MAX_DIGITS or abs(int(power)) > MAX_DIGITS:
        return None
    denominator = Fraction(bottom.replace(",", ""))
    if denominator == 0:
        return None
    value = Fraction(part["whole"] or 0) + Fraction(top.replace(",", "")) / denominator * Fraction(10) ** int(power)
    return -value if part["sign"] else value


def parse_number(answer: str) -> Fraction | None:
    r"""The value of a text that is one number and nothing else but its unit: `$1,234`, `50%`, `18.`, `5\text{ cm}^2`.

    Percent is a unit (50% is 50, not 0.5), as in the answers of GSM8K and MATH. None for anything else.
    """
    text = _plain(answer[-MAX_TEXT:]).strip()
    match = _NUMBER.match(text)
    return _value(match) if match and _UNIT.fullmatch(text, match.end()) else None


# ---- Finding the answer ----


def last_box(text: str) -> str | None:
    r"""The content of the last closed, non-empty `\boxed{...}` (of two nested ones the inner), or None."""
    text, best, opened = text[-MAX_TEXT:], (-1, -1), []
    for token in _BRACES.finditer(text):
        if token["box"] or token[0] == "{":
            opened.append(token.end() if token["box"] else -1)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start > best[0] and text[start : token.start()].strip():
                best = (start, token.start())
    return text[slice(*best)].strip() if best[0] >= 0 else None


def _marked(text: str) -> str | None:
    """What follows the last `####` on its line, if that begins with a number (a Markdown heading does not)."""
    lines = reversed(re.findall(r"#{4,}([^\n#]*)", text[-MAX_TEXT:]))
    return next((line for line in lines if _NUMBER.match(_plain(line).lstrip())), None)


def _last_match(text: str) -> re.Match[str] | None:
    return next(iter(deque(_NUMBER.finditer(_plain(text[-MAX_TEXT:])), maxlen=1)), None)


def extract_gsm8k_answer(text: str) -> str | None:
    r"""The final number of a solution as an exact canonical string ("18", "-3", "1/2"), or None if there is none.

    Looked for in this order: the number right after the last `####` (GSM8K's own mark); in the last `\boxed{...}`,
    after its last `=`; the last number of the text (the flexible extraction of lm-eval's gsm8k).
    A box without a number means no answer, whatever other numbers there are.
    """
    source = _marked(text) or last_box(text)
    match = _last_match(text) if source is None else _NUMBER.search(_plain(source.rpartition("=")[2]))
    number = _value(match) if match else None
    return None if number is None else str(number)


def last_number(text: str) -> str | None:
    """The last number of a text as it is written, but for thousands separators: "1,234.50" gives "1234.50"."""
    match = _last_match(text)
    return match[0].replace(",", "").replace(" ", "") if match else None


def extract_math_answer(text: str) -> str | None:
    r"""The final expression: the last `\boxed{...}`, else the number after the last `####`, else the last number."""
    return last_box(text) or extract_gsm8k_answer(text)


# ---- Comparing answers ----

_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_WRITING = re.compile(r"\\left|\\right|\\displaystyle|\\[,!;: $]|[\s$]|(?<=\\)[dt](?=frac)")
_COMMANDS = re.compile(r"\\([a-zA-Z]+|\S)")
_KNOWN = re.compile(
    r"(?:[dt]?frac|sqrt|pi|infty|cup|cap|pm|cdot|times|div|left|right|text|math(?:rm|bf)|begin|end|circ|in|leq?|geq?|neq?|\W)"
)
_EXPONENT = re.compile(r"\^\s*(?:\{((?:[^{}^]|\{[^{}^]*\})*)\}|(\d+|\w))(?![\s\d]*\^)")


def _depth(expression: str) -> int:
    depth = deepest = 0
    for character in expression:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _tame(expression: str) -> bool:
    """Whether sympy compares this in bounded time: short, shallow, of low degree, no towers of powers, no sums.

    A hard time limit would do as well but for replay: a reward must not depend on how busy the machine is.
    """
    if len(expression) > MAX_EXPRESSION or _depth(expression) > MAX_DEPTH or re.search(r"!|\*\*", expression):
        return False
    if not all(_KNOWN.fullmatch(command) for command in _COMMANDS.findall(expression)):
        return False
    exponents = [braced or single for braced, single in _EXPONENT.findall(expression)]
    degree = math.prod(max(1, int(n)) for exponent in exponents for n in re.findall(r"[0-9]{1,9}", exponent))
    words = re.sub(r"\\(?:text|mathrm|mathbf|begin|end)\{[^{}]*\}|\\[a-zA-Z]+", "", expression)
    variables = set(re.findall(r"[^\W\d_]", words))
    return (
        len(exponents) == expression.count("^")
        and len(variables) <= MAX_VARIABLES
        and degree <= (MAX_DEGREE if variables else MAX_EXPONENT)
    )


def _same_expression(answer: str, gold: str) -> bool:
    """math-verify's verdict on two LaTeX expressions. Its time limit is off: a signal, which threads cannot have."""
    from math_verify import LatexExtractionConfig, parse, verify  # imports sympy: most of a second, so only when needed

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time limit is off
    targets = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = [parse(rf"\boxed{{{text}}}", targets, parsing_timeout=None) for text in (gold, answer)]
    return bool(verify(*parsed, timeout_seconds=None))


def _written(expression: str) -> str:
    r"""`expression` without writing that carries no meaning: spaces, `$`, `\left`, `\text`, the `d` of `\dfrac`."""
    return _WRITING.sub("", _WORDS.sub(r"\1", expression[-MAX_TEXT:]))


def same_answer(answer: str, gold: str) -> bool:
    r"""Whether two final answers mean the same: as exact numbers if both are, else as written, else as expressions.

    Expressions are math-verify's to judge, which rounds decimals to 6 places (1.414214 is `\sqrt{2}`). One beyond the
    limits of this module (see `_tame`) counts only as written.
    """
    answer, gold = _ascii(answer[-MAX_TEXT:]), _ascii(gold[-MAX_TEXT:])
    numbers = parse_number(answer), parse_number(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if _written(answer) == _written(gold):
        return True
    return _tame(answer) and _tame(gold) and _same_expression(answer, gold)
