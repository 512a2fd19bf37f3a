"""Story shapes about courage: a rescue, stopping in a race, facing a fear."""

from scripts.demo_models.story.beats import CLOSING, FRIEND, OPENING, Shape

RESCUE: Shape = (
    (
        OPENING,
        FRIEND,
        (
            "{Time}, the two of them went to {place}. {sky}",
            "{Time}, {hero} and {pal} were playing {at_place}. {sky}",
            '"Let us go to {place}," said {pal} {time}. {sky}',
        ),
    ),
    (
        (
            "Near {landmark} they heard a tiny voice. A(n) {creature} {trouble}.",
            "Suddenly {hero} stopped. A little {creature} {trouble}.",
            '"Look there!" said {pal}. A(n) {creature} {trouble}.',
        ),
        (
            "",
            '"We have to help it," said {hero}. "[But how|What can we do]?" asked {pal}.',
            '"Poor little {creature}," said {hero}. "It must be frightened."',
            "{pal} wanted to run for help, but there was no time.",
        ),
        (
            '"Do not be afraid," {hero} told the {creature}. It trembled and looked at them.',
            '"Hold still, little {creature}," said {pal}, and {phe} knelt down.',
            "They went closer, one step at a time, so as not to scare it.",
        ),
        (
            "Then they {rescue}.",
            "{hero} counted to three, and together they {rescue}.",
            "Very gently, they {rescue}.",
        ),
        (
            "The {creature} shook itself, looked at them and was gone.",
            "For a moment the {creature} sat still. Then it went on its way.",
            '"Thank you," the {creature} seemed to say, and then it was gone.',
        ),
        (
            "The next day it came back and {favour}.",
            "They thought they would never see it again. But a week later it {favour}.",
            "And guess what? Some time later the {creature} {favour}.",
        ),
    ),
    (
        (
            '"It remembered us!" said {hero}. {He} was {glad}.',
            '"Nobody is too small to say thank you," said {pal}.',
            "{hero} laughed, and {pal} danced around {landmark}.",
        ),
        (
            "{hero} learned that no kindness is ever too small.",
            "They told {elder} about the {creature}, and soon the whole town knew.",
            "Since that day, {hero} always looks where {he} steps.",
            '"We should visit the {creature} again," said {hero}, and so they did.',
        ),
        CLOSING,
    ),
)

THE_RACE: Shape = (
    (
        OPENING,
        (
            "Once a year there was a(n) {contest} {course}, and {he} wanted to win it.",
            "{He} had never won anything, and soon there would be the {contest} {course}.",
            "Everybody in town was talking about the {contest} {course}.",
        ),
        (
            "The prize was {prize}.",
            "The winner would get {prize}.",
            "{Elder} had promised {prize} to the winner.",
        ),
        (
            "{hero} practised for {days}.",
            "For {days} {hero} got up early to train.",
            '"This year I will win," said {hero}, and {he} trained for {days}.',
        ),
    ),
    (
        (
            "On the great day a(n) {ptrait} {pkind} named {pal} stood beside {him}.",
            "{His} strongest rival was {pal}, a(n) {ptrait} {pkind} with quick feet.",
            "Next to {him} at the start was {pal}, a(n) {ptrait} {pkind} in a(n) {colour} shirt.",
        ),
        (
            '"Good luck," said {pal}. "You will need it," said {hero}.',
            '"May the best one win," said {pal}, and they shook {phands}.',
            "{sky} {Elder} raised a(n) {colour} flag, and off they went.",
        ),
        (
            "",
            "{hero} and {pal} were soon far ahead of the others.",
            "At {bend} the two of them were in front, side by side.",
            "First {hero} was ahead, then {pal}, then {hero} again.",
        ),
        (
            "Then {pal} {obstacle}.",
            "But just before the finish, {pal} {obstacle}.",
            "Suddenly there was a cry. {pal} had made a mistake and {obstacle}.",
        ),
        (
            "{hero} saw the finish line in front of {him}. {He} only had to go on.",
            '"Now I can win!" thought {hero}. But {he} heard {pal} cry.',
            "{hero} looked at the finish, and then {he} looked back.",
        ),
        (
            '{He} turned around. "Are you hurt?" {he} asked, and {he} helped {phim} up.',
            '{He} stopped and held out a hand. "Come, we will go on together," {he} said.',
            "{hero} went back to help, and all the others ran past them.",
        ),
        (
            "They came in last, arm in arm, and everyone clapped.",
            "Together they crossed the line, long after the winner.",
            "They were the very last, but they were laughing.",
        ),
    ),
    (
        (
            '"You lost because of me," said {pal}. "I found a friend because of you," said {hero}.',
            '"Why did you stop?" asked {pal}. "You would have done the same," said {hero}.',
            "The winner came over and shared the prize with them.",
            "{Elder} gave them a prize of their own, a(n) {colour} {thing} for two.",
        ),
        (
            "{hero} learned that there are better things than winning.",
            "Next year they want to run again, side by side.",
            "{hero} was {glad}, even without {prize}.",
            "Nobody remembers who won that {contest}, but everyone remembers those two.",
        ),
        CLOSING,
    ),
)

BEING_BRAVE: Shape = (
    (
        OPENING,
        (
            "{He} was not afraid of anything, except {fear}.",
            "But there was one thing that frightened {him}, and that was {fear}.",
            "{He} could do many things, but {he} was afraid of {fear}.",
        ),
        (
            "Whenever {he} thought of it, {looked}.",
            "Every time {he} came near it, {looked}.",
            "{He} could not even look, because {looked}.",
        ),
    ),
    (
        FRIEND,
        (
            "{Time}, {pal} lost a(n) {colour} {thing}, and it could only be in one spot.",
            '{Time}, {pal} asked: "Will you help me find my {colour} {thing}?"',
            "{Time}, {pal}'s {colour} {thing} rolled away. {hero} had seen where it went.",
        ),
        (
            '"We have to face {fear}," said {pal}. {hero} turned pale.',
            '"I cannot go there," said {hero}. "I am afraid of {fear}."',
            "{hero} knew what that meant, and {his} knees began to shake.",
        ),
        (
            "",
            '"I am a little afraid, too," said {pal}. "Take my hand."',
            '{pal} did not laugh. "Being brave means being afraid and going anyway," {phe} said.',
            '"We will take a lamp," said {pal}, "and we will sing all the way."',
        ),
        (
            "So they went, step by step, and {hero} held {his} breath.",
            "They walked slowly, and {hero} counted every step.",
            "Hand in hand they went on, and they sang as loudly as they could.",
        ),
        (
            "Then {looked}. {hero} wanted to run away.",
            '"There it is!" whispered {hero}. Once more {looked}.',
            "It was just as {he} had feared. {Looked}!",
        ),
        (
            "But {pal} lifted the lamp, and what did they see? It was only {truth}.",
            "{hero} opened {his} eyes wide and took one more step. It was only {truth}!",
            '"Look closely," said {pal}. It was nothing but {truth}.',
        ),
        (
            "{hero} laughed so hard that {he} had to sit down.",
            '"Was I afraid of {truth}?" asked {hero}, and they both laughed.',
            "{hero} let out a long breath. And right beside it lay the {colour} {thing}!",
        ),
    ),
    (
        (
            "They brought the {thing} home, and {pal} was {glad}.",
            "{pal} hugged the {colour} {thing}, and then {phe} hugged {hero}.",
            '"You were very brave," said {pal}, and {hero} was {glad}.',
        ),
        (
            "{hero} learned that fear is often smaller than it looks.",
            "Since then, {hero} carries a small lamp, just in case.",
            "{He} is still a little afraid of {fear}, but now {he} knows what to do.",
            "Now, when {he} thinks of {fear}, {he} thinks of that day and smiles.",
        ),
        CLOSING,
    ),
)

COURAGE: tuple[Shape, ...] = (RESCUE, THE_RACE, BEING_BRAVE)
