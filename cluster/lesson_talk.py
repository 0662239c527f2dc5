"""Talk without tools: greetings, questions about Forebay, memory of what was said, copying, small sums, refusals."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from forebay.cluster.lesson_tasks import Task
from forebay.cluster.lesson_tools import TOOLS
from forebay.cluster.lesson_values import Values


class Talk(NamedTuple):
    """A question, its answer, why, and what a right answer must contain."""

    kind: str
    question: str
    answer: str
    thought: str
    says: str


GREETINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good day", "hello", "hi", "hey"),
        "Hello! How can I help you?",
    ),
    (("Good morning", "Good morning!"), "Good morning! How can I help you?"),
    (("Good evening", "Good evening!"), "Good evening! How can I help you?"),
    (
        ("How are you?", "How are you today?", "How do you do?", "how are you"),
        "I am well, thank you. What can I do for you?",
    ),
    (("Thanks", "Thank you", "Thank you!", "Thanks a lot", "thanks"), "You are welcome."),
    (("Bye", "Goodbye", "See you", "Good night", "bye"), "Goodbye!"),
    (("Please help me.", "Can you help me?", "I need help."), "Of course. What do you need?"),
    (("Ok", "Okay", "Good", "Great!", "Nice.", "Well done!"), "Glad to hear it. What is next?"),
    (("Sorry", "I am sorry."), "No problem."),
)

FACTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What are you?", "What is your name?", "who are you", "Tell me about yourself."),
        "I am the demo model of Forebay, a small language model that answers in English and calls tools.",
    ),
    (
        ("What is Forebay?", "Tell me about Forebay.", "What does Forebay do?", "what is forebay", "Explain Forebay."),
        "Forebay is a serving cluster for Kimi K3 family models. It runs on Ray and serves agents.",
    ),
    (
        ("What can you do?", "What are your skills?", "How can you help me?"),
        "I can talk a little, call tools, use their results and find facts in a long text.",
    ),
    (
        ("What does the name Forebay mean?", "Why is it called Forebay?", "What is a forebay?"),
        "A forebay is the basin that holds water ready above the gates of the turbines.",
    ),
    (
        ("What is prefill?", "What does a prefill worker do?", "What is the prefill pool?"),
        "Prefill reads the whole prompt and makes the state and the rows that decode needs.",
    ),
    (
        ("What is decode?", "What does a decode worker do?", "What is the decode pool?"),
        "Decode makes the answer, one token at a time, for many sequences at once.",
    ),
    (
        ("What is the router?", "What does the router do?"),
        "The router is the public door: it speaks HTTP, renders the chat format and keeps sessions where "
        "their cache is.",
    ),
    (
        ("What is the ingress?", "What does the ingress do?"),
        "The ingress is the door of one cluster. It works with token ids and gives jobs to workers.",
    ),
    (
        ("What is KDA?", "What is Kimi Delta Attention?", "Explain KDA."),
        "Kimi Delta Attention is a linear attention layer. It keeps a state of fixed size for each sequence.",
    ),
    (
        ("What is the prefix cache?", "What does the store do?", "How does Forebay reuse prompts?"),
        "The store keeps rows and states of prompts seen before, so that a new turn computes only what is new.",
    ),
    (
        ("What is a block?", "What is a block in Forebay?"),
        "A block is a run of tokens that is hashed and looked up as one.",
    ),
    (
        ("What is a page?", "What is a page in Forebay?"),
        "A page is the unit of memory that is allocated. It holds several blocks of rows or one state.",
    ),
    (
        ("What is a lease?", "What is a lease in Forebay?"),
        "A lease pins what a request uses, and gives it back at its end.",
    ),
    (
        ("What is a handoff?", "How does prefill reach decode?"),
        "A handoff is what prefill gives decode: rows, keys and states, all of them or none.",
    ),
    (
        ("What is a session?", "What is a turn?"),
        "A session is the conversation of one agent. A turn is one request of it.",
    ),
    (
        ("Which models does Forebay serve?", "What models can I run?"),
        "Forebay serves Kimi Linear, Kimi K3 and Kimi K3.1.",
    ),
    (
        ("Does Forebay need a GPU?", "Can Forebay run on a laptop?"),
        "No GPU is needed for the demo model. It runs on two CPU cores.",
    ),
    (
        ("How were you trained?", "Who made you?", "How big are you?"),
        "I was trained from scratch for Forebay, in minutes on one GPU, on documentation, dialogues and tool tasks.",
    ),
    (
        ("What is DSA?", "What is sparse attention?"),
        "Sparse attention reads only the tokens that an indexer chooses.",
    ),
    (
        ("What is MoE?", "What is a mixture of experts?"),
        "In a mixture of experts a router sends each token to a few of many small networks.",
    ),
    (
        ("Are you human?", "Are you a person?", "Are you real?"),
        "No, I am a small language model.",
    ),
    (
        ("How do I start Forebay?", "How can I run Forebay?"),
        "Run forebay up. It starts the clusters and the router with the demo model.",
    ),
)
KNOWN = tuple((question, answer) for asked, answer in (*GREETINGS, *FACTS) for question in asked)


def known(v: Values) -> Talk:
    """A greeting or a question about Forebay, by one of its fixed wordings."""
    group = v.random.choice(GREETINGS if v.random.random() < 0.4 else FACTS)
    question = v.random.choice(group[0])
    if v.random.random() < 0.2:
        question = question.lower().rstrip("?!.")
    return Talk("talk", question, group[1], "I can answer this myself.", group[1])


def memory(v: Values) -> Talk:
    """A fact in the same message is asked back."""
    r = v.random
    owners = [v.person() for _ in range(r.randint(1, 6))]
    thing = r.choice(("code", "city", "number", "color", "password", "file"))
    draw: dict[str, Callable[[], str]] = {
        "code": v.code,
        "city": v.city,
        "number": v.number,
        "color": lambda: v.words(1, 1),
        "password": v.code,
        "file": v.path,
    }
    facts = {owner: v.own(draw[thing]) for owner in owners}
    asked = r.choice(list(facts))
    told = " ".join(f"The {thing} of {owner} is {value}." for owner, value in facts.items())
    question = r.choice(("What is the {} of {}?", "Tell me the {} of {}.", "Which {} belongs to {}?")).format(
        thing, asked
    )
    text = f"{told} {question}"
    return Talk("memory", text, f"The {thing} of {asked} is {facts[asked]}.", "It stands in the text.", facts[asked])


def echo(v: Values) -> Talk:
    """Text is to be repeated as it is."""
    r = v.random
    draws = (v.code, v.path, v.number, v.invented, v.city, lambda: v.words(1, 5))
    text = " ".join(v.own(r.choice(draws)) for _ in range(r.randint(1, 6)))
    question = r.choice(("Repeat: {}", "Say: {}", "Copy this text: {}", 'Repeat "{}".', "Write exactly: {}")).format(
        text
    )
    return Talk("echo", question, text, "I repeat the text.", text)


def sums(v: Values) -> Talk:
    """Small sums, which need no tool."""
    a, b = v.random.randint(0, 12), v.random.randint(0, 12)
    question = v.random.choice(("What is {} + {}?", "{} plus {}?", "How much is {} and {}?")).format(a, b)
    return Talk("sums", question, f"{a} + {b} = {a + b}", f"{a} and {b} make {a + b}.", str(a + b))


_CANNOT = {
    "calculator": "calculate",
    "get_weather": "check the weather",
    "read_file": "read files",
    "search": "search",
    "get_time": "check the time",
    "convert_units": "convert units",
    "lookup_order": "look up orders",
    "get_stock_price": "check stock prices",
    "send_message": "send messages",
    "set_timer": "set timers",
}
_TELLING = {
    "calculator": "calculator",
    "get_weather": "weather",
    "read_file": "file",
    "search": "search",
    "get_time": "time",
    "convert_units": "units",
    "lookup_order": "order",
    "get_stock_price": "stock",
    "send_message": "message",
    "set_timer": "timer",
}
assert _CANNOT.keys() == _TELLING.keys() == TOOLS.keys()


def refusal(task: Task, tools: Sequence[dict[str, Any]]) -> Talk:
    """`task` asked where `tools` are declared and its own is missing."""
    able = _CANNOT.get(task.steps[0].tool, "do that")
    thought = f"{checked(task, tools)} I cannot {able}."
    return Talk("refusal", task.question, _sorry(able, tools), thought, f"cannot {able}")


def _sorry(able: str, tools: Sequence[dict[str, Any]]) -> str:
    end = "None of my tools fits." if tools else "I have no tool for it."
    return f"I am sorry, I cannot {able}. {end}"


_BEYOND = (
    *("Book a flight to {city}.", "Find me a hotel in {city}.", "How do I get to {city}?", "Who rules {city}?"),
    *("Call {person}.", "Order a pizza for {person}.", "How old is {person}?", "Invite {person} to lunch."),
    *(
        "Play {word}.",
        "Draw a {word}.",
        "Write a poem about the {word}.",
        "Buy a {word}.",
        "Translate {word} to French.",
    ),
    *("Turn on the {word} light.", "Delete {path}.", "Print {path}.", "Run {path}.", "Pay bill {code}."),
)


def beyond(v: Values, tools: Sequence[dict[str, Any]]) -> Talk:
    """A wish that no tool of any lesson grants."""
    form = v.random.choice(_BEYOND)
    values = {
        "city": v.city(),
        "person": v.person(),
        "word": v.own(v.word),
        "path": v.own(v.path),
        "code": v.own(v.code),
    }
    question, answer = form.format_map(values), _sorry("do that", tools)
    return Talk("refusal", question, answer, "No tool does this. I cannot do that.", "cannot do that")


def tools_at_hand(v: Values, tools: Sequence[dict[str, Any]]) -> Talk:
    """Which tools are declared, or whether one of them does something."""
    r = v.random
    names = [tool["function"]["name"] for tool in tools]
    if r.random() < 0.5:
        question = r.choice(
            ("Which tools do you have?", "What are your tools?", "List your tools.", "What can you call?")
        )
        answer = f"I have {', '.join(names)}." if names else "I have no tools."
        return Talk("tools", question, answer, "I look at my tools.", answer)
    wanted = r.choice([name for name in names if name in _CANNOT and r.random() < 0.5] or list(_CANNOT))
    question = r.choice(("Can you {}?", "Are you able to {}?", "Do you have a tool to {}?")).format(_CANNOT[wanted])
    answer = f"Yes, with {wanted}." if wanted in names else f"No, I cannot {_CANNOT[wanted]}."
    return Talk("tools", question, answer, f"I have {', '.join(names) or 'nothing'}.", answer)


def checked(task: Task, tools: Sequence[dict[str, Any]]) -> str:
    """How the model makes sure that it has what a task needs: what it needs, by the telling word of each tool's name,
    then what it has, then whether that is enough."""
    names = [tool["function"]["name"] for tool in tools]
    wanted = [step.tool for step in task.steps]
    needs = ", ".join(_TELLING.get(name, name.partition("_")[2]) for name in wanted)
    enough = "yes" if set(wanted) <= set(names) else "no"
    return f"I need {needs}. I have {', '.join(names) or 'nothing'}: {enough}."


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}
