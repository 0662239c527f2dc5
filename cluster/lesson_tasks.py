"""Tool tasks: a question, the calls that answer it, what each call returns, and the answer in words.

A task is drawn from `Values` of one side; its question is worded in one of many ways, its answer always in one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.cluster import lesson_tools
from forebay.cluster.lesson_tools import LOOKUP_KEYS, LOOKUP_NOUNS, LOOKUP_VERBS, SEARCHES, TEMPERATURES, TOOLS, UNITS
from forebay.cluster.lesson_values import LETTERS, WORDS, Values


@dataclass(frozen=True, slots=True)
class Step:
    """One call and what the world says to it; `thought` is why it is made."""

    tool: str
    arguments: Mapping[str, Any]
    result: str
    thought: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`tools`: the declarations the steps need. `says`: what a right answer must contain."""

    kind: str
    question: str
    steps: tuple[Step, ...]
    answer: str
    says: str
    tools: tuple[dict[str, Any], ...]


def step(tool: str, thought: str, **arguments: Any) -> Step:
    return Step(tool, arguments, lesson_tools.run(tool, arguments), thought)


def _task(kind: str, question: str, answer: str, says: str, *steps: Step) -> Task:
    return Task(
        kind=kind, question=question, steps=steps, answer=answer, says=says, tools=tuple(TOOLS[s.tool] for s in steps)
    )


_SUMS = {
    "+": (
        "What is {} plus {}?",
        "What's {} + {}?",
        "Add {} and {}.",
        "{} + {} = ?",
        "What is the sum of {} and {}?",
        "Compute {} + {}.",
    ),
    "-": ("What is {} minus {}?", "{} - {} = ?", "Compute {} - {}.", "What do I get when I take {} minus {}?"),
    "*": (
        "What is {} times {}?",
        "Multiply {} by {}.",
        "What's {} * {}?",
        "{} * {} = ?",
        "What is the product of {} and {}?",
    ),
    "/": ("What is {} divided by {}?", "Divide {} by {}.", "{} / {} = ?", "Compute {} / {}."),
}


def calculator(v: Values) -> Task:
    r = v.random
    if r.random() < 0.15:
        expression = v.own(lambda: f"{v.number(4)} {r.choice('+-*')} {v.number(3)} {r.choice('+-')} {v.number(4)}")
        question = r.choice(("Calculate {}.", "What is {}?", "Please compute {}.")).format(expression)
    else:
        sign = r.choice("+-*/")
        expression = v.own(lambda: f"{v.number()} {sign} {v.number(4)}")
        left, _, right = expression.split()
        question = r.choice(_SUMS[sign]).format(left, right)
    only = step("calculator", f"The user wants {expression}. I call the calculator.", expression=expression)
    return _task("calculator", question, f"{expression} = {only.result}", only.result, only)


def weather(v: Values) -> Task:
    city = v.city()
    question = v.random.choice(
        (
            "What is the weather in {}?",
            "What's the weather like in {}?",
            "How is the weather in {} today?",
            "Weather in {}?",
            "Is it raining in {}?",
            "Tell me the weather in {}, please.",
            "Do I need a coat in {}?",
            "How warm is it in {} now?",
        )
    ).format(city)
    only = step("get_weather", f"The user asks about the weather in {city}. I call get_weather.", city=city)
    return _task("weather", question, f"The weather in {city}: {only.result}.", only.result, only)


def file(v: Values) -> Task:
    path = v.own(v.path)
    question = v.random.choice(
        (
            "What does {} say?",
            "Read {}.",
            "Please open the file {}.",
            "Show me {}.",
            "What is in the file {}?",
            "Can you read {} for me?",
        )
    ).format(path)
    only = step("read_file", f"The user wants the text of {path}. I call read_file.", path=path)
    return _task("file", question, f"{path} says: {only.result}", only.result, only)


def search(v: Values) -> Task:
    kind = v.random.choice(list(SEARCHES))
    query = v.own(lambda: SEARCHES[kind][0].format(v.invented()))
    question = v.random.choice(
        ("What is the {}?", "Search for the {}.", "Find the {}.", "Can you look up the {}?", "I need the {}.")
    ).format(query)
    only = step("search", f"The user asks for the {query}. I call search.", query=query)
    return _task("search", question, only.result, only.result, only)


def clock(v: Values) -> Task:
    city = v.city()
    question = v.random.choice(
        (
            "What time is it in {}?",
            "What's the time in {}?",
            "Time in {}?",
            "How late is it in {} now?",
            "Tell me the time in {}.",
        )
    ).format(city)
    only = step("get_time", f"The user asks for the time in {city}. I call get_time.", city=city)
    return _task("clock", question, f"It is {only.result} in {city}.", only.result, only)


def _unit_pair(v: Values) -> tuple[str, str]:
    if v.random.random() < 0.25:
        first, second = v.random.sample(TEMPERATURES, 2)
        return first, second
    first = v.random.choice(list(UNITS))
    return first, v.random.choice([u for u in UNITS if u != first and UNITS[u][0] == UNITS[first][0]])


def _number(text: str) -> float | int:
    return float(text) if "." in text else int(text)


def _conversion(value: str, pair: tuple[str, str], thought: str) -> Step:
    return step("convert_units", thought, value=_number(value), from_unit=pair[0], to_unit=pair[1])


def convert(v: Values) -> Task:
    pair = _unit_pair(v)
    value = v.own(lambda: f"{v.amount()} {pair[0]}").split()[0]
    question = v.random.choice(
        ("Convert {0} {1} to {2}.", "How many {2} are {0} {1}?", "What is {0} {1} in {2}?", "{0} {1} in {2}?")
    ).format(value, *pair)
    only = _conversion(value, pair, f"The user wants {value} {pair[0]} in {pair[1]}. I call convert_units.")
    return _task("convert", question, f"{value} {pair[0]} is {only.result} {pair[1]}.", only.result, only)


def order(v: Values) -> Task:
    order_id = v.own(v.code)
    question = v.random.choice(
        ("Where is order {}?", "What is the status of order {}?", "Look up order {}.", "Has order {} arrived?")
    ).format(order_id)
    only = step("lookup_order", f"The user asks about order {order_id}. I call lookup_order.", order_id=order_id)
    return _task("order", question, f"Order {order_id}: {only.result}.", only.result, only)


def stock(v: Values) -> Task:
    r = v.random
    symbol = v.own(lambda: "".join(r.choice(LETTERS) for _ in range(r.randint(3, 5))).upper())
    question = r.choice(("What is the price of {}?", "How much is {} stock?", "Price of {} shares?")).format(symbol)
    only = step("get_stock_price", f"The user asks for the price of {symbol}. I call get_stock_price.", symbol=symbol)
    return _task("stock", question, f"{symbol} trades at {only.result}.", only.result, only)


def message(v: Values) -> Task:
    to, text = v.person(), v.own(lambda: v.words(2, 6))
    question = v.random.choice(
        ('Send "{1}" to {0}.', 'Tell {0}: "{1}"', 'Please send {0} the message "{1}".', 'Write to {0}: "{1}"')
    ).format(to, text)
    only = step("send_message", f"The user wants to write to {to}. I call send_message.", to=to, text=text)
    return _task("message", question, f'I sent "{text}" to {to}.', text, only)


def timer(v: Values) -> Task:
    minutes = v.own(lambda: f"{v.random.randint(2, 999)} minutes").split()[0]
    question = v.random.choice(
        (
            "Set a timer for {} minutes.",
            "Wake me in {} minutes.",
            "Timer, {} minutes please.",
            "Start a {} minute timer.",
        )
    ).format(minutes)
    only = step("set_timer", f"The user wants a timer of {minutes} minutes. I call set_timer.", minutes=int(minutes))
    return _task("timer", question, f"The timer is set to {minutes} minutes.", minutes, only)


def lookup(v: Values) -> Task:
    """A task for a tool made up on the spot: only its declaration says how it is called."""
    r = v.random
    verb, noun, key = r.choice(LOOKUP_VERBS), r.choice(LOOKUP_NOUNS), r.choice(LOOKUP_KEYS)
    value = v.own(v.code)
    question = r.choice(
        ("{0} the {1} of {2} {3}.", "Please {4} the {1} for {2} {3}.", "I need the {1} of {2} {3}.", "{1} of {3}?")
    ).format(verb.capitalize(), noun, key, value, verb)
    tool = lesson_tools.lookup_tool(verb, noun, key)
    name = tool["function"]["name"]
    only = step(name, f"The user wants the {noun} of {value}. I call {name}.", **{key: value})
    return Task(
        kind="lookup",
        question=question,
        steps=(only,),
        answer=f"The {noun} of {value} is {only.result}.",
        says=only.result,
        tools=(tool,),
    )


def file_then_calculator(v: Values) -> Task:
    r = v.random
    path = v.own(v.path)
    while not (content := lesson_tools.run("read_file", {"path": path})).startswith("The number is"):
        path = v.own(v.path)
    number, sign = content.rstrip(".").split()[-1], r.choice("+-*")
    other = v.own(lambda: f"{number} {sign} {v.number(3)}").split()[-1]
    forms = {
        "+": ("Read {0} and add {1} to its number.", "Add {1} to the number in {0}."),
        "-": ("Read {0} and take {1} from its number.", "Subtract {1} from the number in {0}."),
        "*": ("Read {0} and multiply its number by {1}.", "Multiply the number in {0} by {1}."),
    }
    first = step("read_file", f"First I read {path}. Then I calculate.", path=path)
    expression = f"{number} {sign} {other}"
    second = step("calculator", f"The number is {number}. Now I compute {expression}.", expression=expression)
    question = r.choice(forms[sign]).format(path, other)
    return _task("file, calculator", question, f"{expression} = {second.result}", second.result, first, second)


def weather_then_convert(v: Values) -> Task:
    city = v.city()
    question = v.random.choice(
        (
            "How warm is it in {} in fahrenheit?",
            "What is the temperature in {} in fahrenheit?",
            "Give me the weather in {} in fahrenheit.",
            "Fahrenheit temperature in {}?",
        )
    ).format(city)
    first = step("get_weather", f"First I get the weather in {city}. Then I convert it.", city=city)
    degrees = first.result.split()[0]
    second = _conversion(degrees, ("celsius", "fahrenheit"), f"It is {degrees} celsius. Now I convert it.")
    answer = f"It is {second.result} fahrenheit in {city}."
    return _task("weather, convert", question, answer, second.result, first, second)


def order_then_weather(v: Values) -> Task:
    order_id = v.own(v.code)
    question = v.random.choice(
        (
            "What is the weather where order {} goes?",
            "How is the weather at the destination of order {}?",
            "Order {}: what is the weather at its destination?",
        )
    ).format(order_id)
    first = step("lookup_order", f"First I look up order {order_id}. Then I get the weather.", order_id=order_id)
    city = first.result.split("destination ")[1]
    second = step("get_weather", f"The order goes to {city}. Now I get the weather there.", city=city)
    answer = f"The weather in {city}: {second.result}."
    return _task("order, weather", question, answer, second.result, first, second)


def file_then_time(v: Values) -> Task:
    path = v.own(v.path)
    while not (content := lesson_tools.run("read_file", {"path": path})).startswith("The city is"):
        path = v.own(v.path)
    city = content.rstrip(".").split()[-1]
    question = v.random.choice(
        (
            "Read {} and tell me the time in its city.",
            "What time is it in the city named in {}?",
            "Which time is it in the city of {}?",
        )
    ).format(path)
    first = step("read_file", f"First I read {path}. Then I ask for the time.", path=path)
    second = step("get_time", f"The city is {city}. Now I ask for the time there.", city=city)
    return _task("file, clock", question, f"It is {second.result} in {city}.", second.result, first, second)


def search_then_calculator(v: Values) -> Task:
    kind = v.random.choice(("height", "length", "population"))
    query = v.own(lambda: SEARCHES[kind][0].format(v.invented()))
    other = v.random.randint(2, 99)
    question = v.random.choice(
        ("Search for the {} and multiply it by {}.", "Find the {} and multiply it by {}.", "What is the {} times {}?")
    ).format(query, other)
    first = step("search", f"First I search for the {query}. Then I calculate.", query=query)
    number = next(word for word in first.result.split() if word.isdigit())
    expression = f"{number} * {other}"
    second = step("calculator", f"It is {number}. Now I compute {expression}.", expression=expression)
    return _task("search, calculator", question, f"{expression} = {second.result}", second.result, first, second)


def file_then_message(v: Values) -> Task:
    path, to = v.own(v.path), v.person()
    question = v.random.choice(
        ("Read {0} and send its text to {1}.", "Send the text of {0} to {1}.", "Tell {1} what {0} says.")
    ).format(path, to)
    first = step("read_file", f"First I read {path}. Then I write to {to}.", path=path)
    second = step("send_message", f"Now I send the text to {to}.", to=to, text=first.result)
    return _task("file, message", question, f'I sent "{first.result}" to {to}.', first.result, first, second)


ONE_STEP: tuple[Callable[[Values], Task], ...] = (
    *(calculator, weather, file, search, clock, convert, order, stock, message, timer, lookup),
)
TWO_STEP: tuple[Callable[[Values], Task], ...] = (
    *(file_then_calculator, weather_then_convert, order_then_weather),
    *(file_then_time, search_then_calculator, file_then_message),
)
assert not set(WORDS) & set(UNITS), "a file's word is never a unit"
