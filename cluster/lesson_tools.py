"""The tools of the lessons: their declarations, and a world in which they can be called.

`run` is a pure function of tool and arguments: the weather of a city, the text of a file, what a search finds are drawn
from a digest of the arguments. So lessons, checks and a live agent loop see the same world, and nothing is stored.
"""

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

from forebay.cluster.lesson_values import Values, held_out

SKIES = ("sun", "clouds", "light rain", "heavy rain", "snow", "fog", "strong wind", "clear sky", "thunder")
STATES = ("packed", "shipped", "delayed", "delivered", "on its way")
# Factor to a base unit of the same kind, temperatures apart.
UNITS: Mapping[str, tuple[str, float]] = {
    "kilometers": ("length", 1000.0),
    "miles": ("length", 1609.344),
    "meters": ("length", 1.0),
    "feet": ("length", 0.3048),
    "inches": ("length", 0.0254),
    "centimeters": ("length", 0.01),
    "kilograms": ("mass", 1.0),
    "pounds": ("mass", 0.45359237),
    "grams": ("mass", 0.001),
    "ounces": ("mass", 0.028349523125),
    "liters": ("volume", 1.0),
    "gallons": ("volume", 3.785411784),
    "hours": ("time", 3600.0),
    "minutes": ("time", 60.0),
    "days": ("time", 86400.0),
}
TEMPERATURES = ("celsius", "fahrenheit")


def declare(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """An OpenAI function declaration; every parameter is required, its value here is its JSON type."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: Mapping[str, dict[str, Any]] = {
    tool["function"]["name"]: tool
    for tool in (
        declare("calculator", "Evaluate an arithmetic expression.", expression="string"),
        declare("get_weather", "Current weather in a city.", city="string"),
        declare("read_file", "Read a text file.", path="string"),
        declare("search", "Search for a fact.", query="string"),
        declare("get_time", "Current local time in a city.", city="string"),
        declare("convert_units", "Convert a value.", value="number", from_unit="string", to_unit="string"),
        declare("lookup_order", "Look up an order.", order_id="string"),
        declare("get_stock_price", "Price of a stock.", symbol="string"),
        declare("send_message", "Send a message.", to="string", text="string"),
        declare("set_timer", "Set a timer.", minutes="number"),
    )
}
LOOKUP_VERBS = ("fetch", "find", "check", "show", "open")
LOOKUP_NOUNS = [
    "invoice",
    "parcel",
    "ticket",
    "booking",
    "account",
    "sensor",
    "badge",
    "license",
    "permit",
    "contract",
    "record",
    "shipment",
    "voucher",
    "deposit",
    "locker",
    "warranty",
    "payment",
    "claim",
    "device",
    "vehicle",
]
LOOKUP_KEYS = ("id", "name", "code", "key", "number", "reference")


def lookup_tool(verb: str, noun: str, key: str) -> dict[str, Any]:
    """A tool that no model has seen in this combination: `fetch_invoice(code)`."""
    return declare(f"{verb}_{noun}", f"{verb.capitalize()} the {noun} of a {key}.", **{key: "string"})


class ToolError(ValueError):
    """A call that the world cannot answer; the message goes to the model."""


def run(tool: str, arguments: Mapping[str, Any]) -> str:
    """The tool's answer as text. ToolError for an unknown tool, wrong arguments or a value without a meaning."""
    try:
        if tool in _WORLD:
            return _WORLD[tool](**arguments)
        return _lookup(tool, arguments)
    except (TypeError, KeyError, SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise ToolError(f"{tool}: {error}") from None


def drawn(*parts: object) -> random.Random:
    """A source of chance that is a function of `parts`."""
    return random.Random(blake2b(json.dumps(parts).encode(), digest_size=8).digest())


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """The value of numbers joined by + - * / and parentheses, whole where it is whole, else to 4 decimals."""
    return plain(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return float(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case _:
            raise ToolError("calculator: only numbers, + - * / and parentheses")


def plain(number: float, decimals: int = 4) -> str:
    """A number without a trailing zero."""
    rounded = round(number, decimals)
    return str(int(rounded)) if rounded == int(rounded) else str(rounded)


def _weather(city: str) -> str:
    chance = drawn("weather", city)
    return f"{chance.randint(-20, 42)} celsius, {chance.choice(SKIES)}"


def _time(city: str) -> str:
    chance = drawn("time", city)
    return f"{chance.randint(0, 23):02}:{chance.randint(0, 59):02}"


def _file(path: str) -> str:
    chance = drawn("file", path)
    values = Values(chance, held_out(path))
    kind = chance.randrange(5)
    if kind == 0:
        return f"The number is {values.number()}."
    if kind == 1:
        return f"The city is {values.city()}."
    if kind == 2:
        return f"The code is {values.code()}."
    if kind == 3:
        return f"{values.person()} meets {values.person()} at {_time(path)}."
    return values.sentence()


SEARCHES = {
    "height": ("height of {}", "{} is {} meters high."),
    "length": ("length of {}", "{} is {} kilometers long."),
    "population": ("population of {}", "{} has {} inhabitants."),
    "founding year": ("founding year of {}", "{} was founded in {}."),
    "owner": ("owner of {}", "{} belongs to {}."),
    "capital": ("capital of {}", "The capital of {} is {}."),
}


def _search(query: str) -> str:
    found = re.fullmatch(r"(.+?) of (\S.*)", query)
    if found is None or found[1] not in SEARCHES:
        return "No results."
    chance = drawn("search", query)
    values = Values(chance, held_out(query))
    named = found[1] in ("owner", "capital")
    fact = values.invented() if named else str(chance.randint(1100, 2029) if "year" in found[1] else values.number())
    return SEARCHES[found[1]][1].format(found[2], fact)


def _convert(value: float, from_unit: str, to_unit: str) -> str:
    if (from_unit, to_unit) == TEMPERATURES:
        return plain(value * 9 / 5 + 32, 2)
    if (to_unit, from_unit) == TEMPERATURES:
        return plain((value - 32) * 5 / 9, 2)
    kind, factor = UNITS[from_unit]
    other, divisor = UNITS[to_unit]
    if kind != other:
        raise ToolError(f"convert_units: {from_unit} cannot become {to_unit}")
    return plain(value * factor / divisor, 2)


def _order(order_id: str) -> str:
    chance = drawn("order", order_id)
    return f"{chance.choice(STATES)}, destination {Values(chance, held_out(order_id)).city()}"


def _price(symbol: str) -> str:
    return f"{drawn('stock', symbol).randint(100, 99999) / 100:.2f} dollars"


def _send(to: str, text: str) -> str:
    return f"sent to {to}"


def _timer(minutes: float) -> str:
    return f"timer runs for {plain(minutes)} minutes"


def _lookup(tool: str, arguments: Mapping[str, Any]) -> str:
    verb, _, noun = tool.partition("_")
    if verb not in LOOKUP_VERBS or noun not in LOOKUP_NOUNS or len(arguments) != 1:
        raise ToolError(f"{tool}: no such tool")
    value = str(next(iter(arguments.values())))
    return Values(drawn(noun, value), held_out(value)).code()


_WORLD: dict[str, Callable[..., str]] = {
    "calculator": calculate,
    "get_weather": _weather,
    "read_file": _file,
    "search": _search,
    "get_time": _time,
    "convert_units": _convert,
    "lookup_order": _order,
    "get_stock_price": _price,
    "send_message": _send,
    "set_timer": _timer,
}
