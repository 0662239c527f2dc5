"""The values that lessons and checks are about: numbers, names, paths, codes. A value belongs to one side for ever.

`held_out(value)` is a function of the value alone, so lessons and checks can never share one: lessons draw values of
which it says no, checks draw those of which it says yes.
"""

import random
from collections.abc import Callable
from hashlib import blake2b

HELD_OUT_OF_256 = 26

_CITIES = """
Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Dublin Athens Helsinki Stockholm Copenhagen Warsaw Budapest
Brussels Amsterdam Zurich Geneva Milan Naples Turin Lyon Nice Porto Seville Valencia Hamburg Munich Cologne London
Leeds Bristol Glasgow Cardiff Tokyo Osaka Kyoto Seoul Busan Beijing Shanghai Taipei Manila Hanoi Bangkok Jakarta
Singapore Delhi Mumbai Chennai Kolkata Karachi Lahore Dhaka Colombo Kathmandu Tehran Baghdad Riyadh Doha Dubai Amman
Beirut Cairo Tunis Algiers Lagos Accra Nairobi Kampala Lusaka Harare Durban Dakar Boston Chicago Denver Dallas
Houston Austin Seattle Portland Phoenix Atlanta Miami Detroit Toronto Montreal Ottawa Calgary Lima Quito Bogota
Caracas Santiago Montevideo Recife Sydney Melbourne Perth Brisbane Auckland Wellington Tallinn Riga Vilnius Sofia
Bucharest Zagreb Belgrade Reykjavik
"""
_PEOPLE = """
Mia Noah Emma Liam Olivia Lucas Anna Felix Clara Hugo Lena Oscar Nora Ivan Maya Omar Sara Leo Eva Adam Rosa Karl
Julia Max Alice Theo Ella Simon Laura Victor Irene Pablo Greta Samir Yuki Amir Tara Bruno Celia Dora
"""
_WORDS = """
apple river stone garden window letter market bridge forest planet silver copper engine signal paper summer winter
monday budget invoice report travel recipe music photo project meeting lesson ticket kitchen office school museum
harbor valley castle lantern mirror basket candle blanket pocket marble pepper ginger lemon cherry orange violet
purple yellow green brown quiet happy gentle bright clever brave early late north south east west upper lower small
large round heavy light simple modern ancient golden wooden frozen hidden open broken fresh sweet bitter sales stock
order client server backup update draft final weekly daily annual public private shared local global train plane
boat horse tiger eagle salmon rabbit spider dragon doctor artist farmer sailor teacher pilot baker house tower
island desert ocean cloud storm thunder rain snow wind fire water earth metal glass cotton rope wheel hammer needle
button ribbon pencil ruler table chair carpet ladder bucket shovel bottle plate spoon bread butter cheese coffee
honey sugar onion carrot potato tomato salad soup dinner lunch party dance story poem novel chapter page index
number color shape sound voice dream idea reason answer question problem model token cache worker page prefix router
cluster
"""
CITIES, PEOPLE, WORDS = (tuple(text.split()) for text in (_CITIES, _PEOPLE, _WORDS))
_STARTS, _VOWELS, _ENDS = (
    text.split()
    for text in (
        "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v w y z",
        "a e i o u ai ea ia oa ou",
        "n r l s t m nd rk th x v do ra lo na ri ka mo",
    )
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def held_out(value: str) -> bool:
    """Whether a value is kept from lessons, about one in ten."""
    return blake2b(value.encode(), digest_size=1).digest()[0] < HELD_OUT_OF_256


class Values:
    """Draws values of one side (`checking`: those kept from lessons) from `random`."""

    def __init__(self, source: random.Random, checking: bool) -> None:
        self.random, self.checking = source, checking

    def own(self, draw: Callable[[], str]) -> str:
        """The first drawn value of this side."""
        while held_out(value := draw()) != self.checking:
            pass
        return value

    def number(self, digits: int = 5) -> str:
        """An integer of 2 to `digits` digits."""
        size = self.random.randint(2, digits)
        return str(self.random.randint(10 ** (size - 1), 10**size - 1))

    def amount(self) -> str:
        """A number as people give it: mostly whole, sometimes with one or two decimals."""
        whole = self.random.randint(2, 999)
        return f"{whole}.{self.random.randint(1, 9)}" if self.random.random() < 0.25 else str(whole)

    def invented(self) -> str:
        """A capitalised word that is nobody's name."""
        pick = self.random.choice
        body = "".join(pick(_STARTS) + pick(_VOWELS) for _ in range(self.random.randint(1, 3)))
        return (body + pick(_ENDS)).capitalize()

    def city(self) -> str:
        return self.own(lambda: self.random.choice(CITIES) if self.random.random() < 0.5 else self.invented())

    def person(self) -> str:
        return self.own(lambda: self.random.choice(PEOPLE) if self.random.random() < 0.6 else self.invented())

    def code(self) -> str:
        """An identifier of letters and digits in one of a few usual forms."""
        r = self.random
        form = r.randrange(5)
        if form == 0:
            return "".join(r.choice(LETTERS + "0123456789") for _ in range(r.randint(4, 9)))
        if form == 1:
            return "".join(r.choice(LETTERS).upper() for _ in range(r.randint(2, 3))) + f"-{r.randint(100, 99999)}"
        if form == 2:
            return "".join(r.choice("0123456789abcdef") for _ in range(r.randint(6, 10)))
        if form == 3:
            return f"{self.word()}-{r.randint(10, 999)}"
        return str(r.randint(1000, 999999))

    def word(self) -> str:
        """Mostly a known word, now and then an invented one: what is copied must be read, not guessed."""
        return self.random.choice(WORDS) if self.random.random() < 0.85 else self.invented().lower()

    def words(self, least: int, most: int) -> str:
        return " ".join(self.word() for _ in range(self.random.randint(least, most)))

    def path(self) -> str:
        r = self.random
        stem = "_".join(self.word() for _ in range(r.randint(1, 2)))
        tail = r.choice(("", str(r.randint(1, 99)), f"_{r.randint(1, 2030)}"))
        folder = "".join(f"{self.word()}/" for _ in range(r.randint(0, 2)))
        return f"{folder}{stem}{tail}.{r.choice(('txt', 'md', 'csv', 'log', 'json'))}"

    def sentence(self) -> str:
        return f"{self.words(3, 8)}.".capitalize()
