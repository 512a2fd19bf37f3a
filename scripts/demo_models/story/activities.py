"""Story shapes about activities: making a gift, planting a seed, a picnic in bad weather."""

from scripts.demo_models.story.beats import ARRIVE, CLOSING, FRIEND, HABIT, MEET, OPENING, Shape

HANDMADE_GIFT: Shape = (
    (
        OPENING,
        FRIEND,
        (
            "Soon it would be {pal}'s birthday, and {hero} wanted to make a present.",
            "{pal} had been ill for {days}, and {hero} wanted to cheer {phim} up.",
            "The next day was {pal}'s birthday, but {hero} had no money for a present.",
        ),
        (
            '"I will make a(n) {gift}," {he} thought, "and I will make it from {material}."',
            "{He} decided to make a(n) {gift} out of {material}.",
            '"What about a(n) {gift}?" said {elder}. "You could make it from {material}."',
        ),
    ),
    (
        (
            "{He} found what {he} needed {at_place} and carried it home.",
            "{He} searched {at_place} until {his} {colour} bag was full.",
            "All morning {he} gathered things {at_place}, and {mood}.",
        ),
        (
            "",
            "{He} worked [all day|until the lamps were lit|with great care].",
            "{He} measured and cut and glued, and {he} hummed a little tune.",
            "It was harder than {he} had thought, but {he} did not give up.",
        ),
        (
            "But when the {gift} was nearly done, {mishap}.",
            "Just before the last step, {mishap}.",
            "Then {he} bumped into the table, and {mishap}.",
        ),
        (
            "{hero} sat down and felt {sad}. It was too late to begin again.",
            '"Now everything is spoiled," said {hero}, and {he} was {sad}.',
            "{He} closed {his} eyes and counted to ten.",
        ),
        (
            '"Look at it once more," said {elder}. So {hero} {mend}.',
            "Then {he} had an idea. {He} {mend}.",
            '{Elder} smiled. "That can be mended." And {hero} {mend}.',
        ),
    ),
    (
        (
            "{pal} opened the parcel and {phis} eyes grew wide.",
            "When {pal} saw the {gift}, {phe} jumped for joy.",
            '"Is this for me?" asked {pal}, and {phe} held the {gift} very carefully.',
        ),
        (
            '"You made this {gift} yourself?" asked {pal}. "It is the best present of all!"',
            '"I like the mended part best," said {pal}. "There is no other {gift} like it."',
            '"A(n) {gift}!" cried {pal}. "I have always wanted one."',
        ),
        (
            "{hero} learned that a gift is made of time more than of {material}.",
            "{hero} was {glad}, and {he} never told {phim} how long it had taken.",
            "They put the {gift} in the window, where everyone could see it.",
            "The {gift} is still there today, a little crooked and much loved.",
        ),
        CLOSING,
    ),
)

PLANTING: Shape = (
    (
        OPENING,
        HABIT,
        ARRIVE,
        MEET,
        (
            '{pal} gave {him} a(n) {seed}. "Plant it and be patient," {phe} said.',
            '"I have something for you," said {pal}, and {phe} gave {him} a(n) {seed}.',
            "In {phis} {phands} {pal} had a(n) {seed}, and {phe} gave it to {hero}.",
        ),
    ),
    (
        (
            "{hero} dug a hole behind the house and put the {seed} in.",
            "{hero} filled a(n) {colour} pot with earth and planted the {seed}.",
            "At home {hero} planted the {seed} in the sunniest corner.",
        ),
        (
            "Every morning {he} gave it water from a(n) {colour} can.",
            "{He} watered it each day and sang to it each night.",
            "{He} watered it and told it what the weather was like.",
        ),
        (
            "After {days} there was still nothing to see, and {hero} was {sad}.",
            "{He} waited for {days}, but nothing happened.",
            "For {days} the earth stayed brown and bare.",
        ),
        (
            '"It does not work," {he} said. "[Things grow before we see them|Wait]," said {pal}.',
            '"Perhaps it is asleep," said {hero}. "Then let it sleep," {pal} answered.',
            '{hero} wanted to dig it up again. "Not yet," said {pal}. "Give it time."',
        ),
        (
            "Then, one morning, a small green {plant} looked out of the earth.",
            "And one day there it was, a thin green {plant}!",
            "The very next morning {he} saw the tip of a(n) {plant}.",
        ),
        (
            "",
            "The {plant} grew and grew, past the [fence|window|gate].",
            "It grew a little every day, and {hero} measured it with a string.",
            "Rain fell on it and the sun warmed it, and soon it was as tall as {hero}.",
        ),
    ),
    (
        (
            "At the end of the summer there was {harvest}.",
            "And what came of it? There was {harvest}!",
            "At last {hero} called {pal}, for there was {harvest}.",
        ),
        (
            '"Now you know what patience is for," said {pal}.',
            '"We did it!" cried {hero}. "You did it," said {pal}, "and the {seed} did the rest."',
            "{hero} gave half of it to {pal} and half to {elder}.",
            "{hero} learned that good things need time.",
        ),
        CLOSING,
    ),
)

WEATHER_SURPRISE: Shape = (
    (
        OPENING,
        FRIEND,
        (
            "{Time}, the two of them packed a basket and went to {place}.",
            "{Time}, they planned to have a picnic {at_place}.",
            '"Let us have a picnic {at_place}," said {pal} {time}. {hero} packed a basket.',
        ),
        (
            "There was a(n) {food} for each of them, and {hero} had {his} {colour} {thing}.",
            "{hero} brought a(n) {food}, and {pal} brought {phis} {colour} {thing}.",
            "They took along a(n) {food}, a blanket and a(n) {colour} {thing}.",
        ),
    ),
    (
        (
            "But they had hardly sat down when {storm}.",
            "For an hour they played in peace. Then, all at once, {storm}.",
            "They had just opened the basket when {storm}.",
        ),
        (
            '"Our picnic is ruined!" said {hero}, and {he} felt {sad}.',
            '"What shall we do now?" asked {hero}. {He} looked very {sad}.',
            '{hero} stamped {his} foot. "Why today of all days?" {he} said.',
        ),
        (
            '"Not at all," said {pal}. "Follow me!" And {phe} ran to {landmark}.',
            '"It is only some {weather}," said {pal}. "Quick, to {landmark}!"',
            '{pal} laughed. "A little {weather} is fun," {phe} said, and ran to {landmark}.',
        ),
        (
            "There they were safe. They ate the {food} and listened while {noise}.",
            "They found shelter there, and while {noise}, they shared the {food}.",
            "It was dry and cosy there. Outside {noise}, and inside they {game}.",
        ),
        (
            "",
            "Then they {game} until they forgot the {weather}.",
            "They laughed and {game}, and the time flew by.",
            "{pal} had an idea, and so they {game}.",
        ),
    ),
    (
        (
            "When the {weather} was over, {after}.",
            "After a while they peeped out. The {weather} had passed, and {after}.",
            "At last the {weather} stopped, and {after}.",
        ),
        (
            '"[How beautiful|Just look at that]!" said {hero}. "I am glad that we stayed."',
            '"That was the best picnic of all," said {hero}, and {pal} nodded.',
            '"Without the {weather} we would have missed this," said {pal}.',
            "{hero} learned that a spoiled plan can be the start of a better one.",
        ),
        CLOSING,
    ),
)

ACTIVITIES: tuple[Shape, ...] = (HANDMADE_GIFT, PLANTING, WEATHER_SURPRISE)
