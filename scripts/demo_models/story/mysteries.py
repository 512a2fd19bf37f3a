"""Story shapes about mysteries: a lost thing, a noise in the night, a treasure map."""

from scripts.demo_models.story.beats import CLOSING, COMES_TO_HELP, HABIT, OPENING, THANKS, Shape

LOST_AND_FOUND: Shape = (
    (
        OPENING,
        (
            "{He} had a(n) {colour} {thing} with {feature}.",
            "{His} dearest treasure was a(n) {colour} {thing} with {feature}.",
            "For {his} birthday {he} had been given a(n) {colour} {thing} with {feature}.",
            "{Elder} had given {him} a(n) {colour} {thing} with {feature}.",
        ),
        (
            "{He} loved to {use}.",
            "Every day {he} liked to {use}.",
            "Nothing was better than to {use}.",
            "It was {his} greatest joy to {use}.",
        ),
    ),
    (
        (
            "{Time}, {he} took the {thing} to {place}.",
            "{Time}, {hero} carried the {colour} {thing} to {place}.",
            "{Time}, {he} went to {place}, and of course the {thing} came along.",
        ),
        (
            "When {he} wanted to go home, the {thing} was gone.",
            "{He} played and played, but then the {colour} {thing} was nowhere to be seen.",
            "{He} put it down for a moment, and when {he} turned around it had vanished.",
            "On the way back {he} noticed that {his} {hands} were empty.",
        ),
        (
            '"Oh no! Where is my {thing}?" cried {hero}.',
            '"My {colour} {thing} is gone!" said {hero}, and {he} began to cry.',
            "{hero} looked left and right, but {he} could not find it. {He} felt {sad}.",
            "{He} searched and searched until {he} was tired and {sad}.",
        ),
        COMES_TO_HELP,
        (
            '"Why are you so {sad}?" asked {pal}. "I lost my {colour} {thing}," said {hero}.',
            '"What are you looking for?" asked {pal}. "For my {thing}," {hero} answered.',
            '"I lost my {thing}," said {hero}. "It is {colour} and has {feature}."',
        ),
        (
            '"Let us look together," said {pal}. "[Four eyes see more than two|We will find it]."',
            '"Do not worry," {phe} said. "[Think of where you have been|I am good at finding]."',
            '"I will help you," said {pal}, and {phe} rolled up {phis} sleeves.',
        ),
        (
            "",
            "They looked behind {landmark}, but there was [nothing|only dust|only an old shoe].",
            "Near {landmark} they found [a button|a coin|a nut], but no {thing}.",
            "{pal} looked up and {hero} looked down, all the way to {landmark}.",
        ),
        (
            "At last {pal} looked {under}, and there lay the {colour} {thing}!",
            '"Look!" called {pal}. Something {colour} was shining {under}. It was the {thing}!',
            "Then {hero} looked {under}. There it was, {his} {colour} {thing}!",
        ),
    ),
    (
        THANKS,
        (
            "Now {hero} lets {pal} use the {thing} as often as {phe} likes.",
            "After that, they took turns with the {thing}.",
            "{hero} learned that a lost thing can lead to a found friend.",
            "{He} tied a ribbon to the {thing}, so that it would not get lost again.",
        ),
        CLOSING,
    ),
)

SMALL_MYSTERY: Shape = (
    (
        OPENING,
        HABIT,
        (
            "One night {he} heard {sound}. It came from [the kitchen|the hall|the stairs].",
            "One evening, when all the lamps were out, {he} woke up because of {sound}.",
            "For {days} there had been {sound} in the house every night, and nobody knew why.",
        ),
    ),
    (
        (
            '"Who is there?" whispered {hero}. Nobody answered.',
            "{His} heart beat fast, but {he} wanted to know what it was.",
            '"Maybe it is a [ghost|giant|pirate]," {he} thought, and pulled up the blanket.',
        ),
        (
            "In the morning {he} told {pal}, a(n) {ptrait} {pkind} who loved puzzles.",
            "{He} called {his} friend {pal}, a(n) {ptrait} {pkind} who was never afraid.",
            "So {he} asked {pal}, a(n) {ptrait} {pkind} from next door, to stay for the night.",
        ),
        (
            '"A mystery!" said {pal}. "[We need a lamp|We must look for clues]."',
            '"Every sound has a reason," said {pal}. "Let us find it."',
            '"First we listen, then we look," said {pal}, and {phe} lit {phis} {colour} lamp.',
        ),
        (
            "On the floor they found {clue}.",
            "Soon {pal} pointed at the floor. There they saw {clue}.",
            '"Here is a clue," said {hero}. In the light of the lamp they saw {clue}.',
        ),
        (
            "",
            "They followed it past [the stove|the clock|the stairs] on the tips of their toes.",
            "Step by step they followed it to [the pantry|a small door|the back room].",
            '"It was not there yesterday," {hero} said. They crept on without a sound.',
        ),
        (
            "There, in the corner, was {cause}.",
            "They held their breath and looked. It was {cause}!",
            "{pal} lifted the lamp. It was no monster at all, but {cause}.",
        ),
        (
            "They both laughed, and then they {kindness}.",
            '"Poor thing," said {hero}. So they {kindness}.',
            '"So you are our mystery," said {pal}. Together they {kindness}.',
        ),
    ),
    (
        (
            "That night the house was quiet, and {hero} slept well.",
            "The next night there was no sound at all, only {pal} snoring.",
            "In the morning they wrote it all down in a(n) {colour} notebook.",
        ),
        (
            '"What shall we solve next?" asked {pal}.',
            "{hero} learned that most things are less frightening when you look at them.",
            "And {hero} was {glad} that {he} had been brave enough to look.",
            "Since then, whenever something is strange, people call {hero} and {pal}.",
        ),
        CLOSING,
    ),
)

TREASURE_MAP: Shape = (
    (
        OPENING,
        (
            "{Time}, {he} found an old map {map_home}.",
            "{Time}, while {he} was cleaning, {he} found a map {map_home}.",
            "{Time}, {elder} gave {him} a map that had been hidden {map_home}.",
        ),
        (
            "In the middle there was a(n) {colour} cross, right beside {landmark}.",
            "It showed {place}, and a(n) {colour} cross was painted near {landmark}.",
            "A(n) {colour} line led to {place} and ended in a cross.",
        ),
    ),
    (
        (
            "{He} ran to {his} friend {pal}, a(n) {ptrait} {pkind}, and showed {phim} the map.",
            "{He} showed it to {pal}, a(n) {ptrait} {pkind} who had a shovel.",
            "{pal}, a(n) {ptrait} {pkind}, wanted to come along at once.",
        ),
        (
            "",
            '"A treasure!" said {pal}. "What do you think it is?"',
            '"Maybe it is gold," said {pal}. "Maybe it is cheese," said {hero}.',
            '"We must not tell anyone," {phe} whispered, and {hero} nodded.',
        ),
        (
            "They walked to {place} and counted [twenty|thirty|fifty] steps from {landmark}.",
            "{At_place}, {mood}. They held the map up and walked toward {landmark}.",
            "It was a long way to {place}, and they {game} when they rested.",
        ),
        (
            "They looked {under}, but there was nothing.",
            "At first they went the wrong way, because {pal} held the map upside down.",
            "Then the wind took the map, and {hero} had to jump to catch it.",
        ),
        (
            '"Let us go home," said {hero}. "One more try," said {pal}.',
            "{hero} was {sad}, but {pal} would not give up.",
            "They were tired, and their feet hurt, but they did not stop.",
        ),
        (
            "Then the shovel hit something hard. It was a(n) {colour} box!",
            "And there, deep in the earth, was a small {colour} box.",
            "{pal} dug, {hero} pulled, and out came a(n) {colour} box.",
        ),
        (
            "Inside the box was {treasure}.",
            "They opened it slowly. Inside they found {treasure}.",
            "There was no gold in it. There was {treasure}.",
        ),
    ),
    (
        (
            'Under the lid someone had written: "{wisdom}."',
            '{hero} read what was written on the lid: "{wisdom}."',
            'A note lay beside it, and it said: "{wisdom}."',
        ),
        (
            "They put something of their own into the box and buried it again.",
            "They shared it, and {hero} kept the {colour} box under {his} bed.",
            '"I liked the way there best," said {pal}, and {hero} agreed.',
            '"It is better than gold," said {hero}. {He} was {glad}.',
        ),
        CLOSING,
    ),
)

MYSTERIES: tuple[Shape, ...] = (LOST_AND_FOUND, SMALL_MYSTERY, TREASURE_MAP)
