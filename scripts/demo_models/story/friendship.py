"""Story shapes about friendship: learning a skill, meeting, sharing, owning up."""

from scripts.demo_models.story.beats import (
    ARRIVE,
    CLOSING,
    COMES_TO_HELP,
    FRIEND,
    HABIT,
    MEET,
    OPENING,
    THANKS,
    Shape,
)

LEARNING: Shape = (
    (
        OPENING,
        (
            "All the others could {skill}, but {hero} could not.",
            "There was one thing that {he} wanted very much. {He} wanted to {skill}.",
            '"[When I am big|One day], I will {skill}," {he} told {elder}.',
            "{He} dreamed of it every night. In {his} dreams {he} could {skill}.",
        ),
        (
            "{Time}, {he} tried it for the first time, but {fail}.",
            "{Time}, {he} went to {place} to try, but {fail}.",
            "{Time}, {hero} took a deep breath and tried. But {fail}.",
        ),
    ),
    (
        (
            "",
            "{He} tried again, and again {fail}.",
            "{hero} felt {sad}. {He} wanted to give up.",
            '"I will never learn to {skill}," {he} said, and {he} was {sad}.',
            '"It is too hard!" cried {hero}. {He} sat down and was {sad}.',
        ),
        COMES_TO_HELP,
        (
            '"I saw you," said {pal}. "[I fell down many times, too|It is hard at first]."',
            '"Would you like some help?" asked {pal}. {hero} nodded.',
            '"Nobody can {skill} on the first day," said {pal}.',
            '"Let me show you how to {skill}," {phe} said kindly.',
        ),
        (
            '"{tip}," said {pal}. "[Then try once more|That is the whole secret]."',
            '"There is a trick," {phe} said. "{tip}."',
            'Then {pal} showed {him} slowly. "{tip}," {phe} said.',
        ),
        (
            "So they practised together for {days}, [in the sun and in the rain|little by little].",
            "{hero} practised every day, and {pal} cheered for {him}.",
            "For {days} they met near {landmark}, and {hero} tried and tried.",
            "Each day it went a little better, and each day they {game} afterwards.",
        ),
        (
            "{hero} remembered {pal}'s words, and then, all at once, {win}.",
            "And then it happened. This time {win}!",
            "One day {hero} tried again, and, to everyone's surprise, {win}.",
        ),
    ),
    (
        (
            '"I can {skill}!" shouted {hero}. "I can {skill}!"',
            '"Did you see that?" cried {hero}, and {pal} clapped {phis} {phands}.',
            '{pal} jumped for joy. "I knew that you could {skill}!" {phe} said.',
        ),
        THANKS,
        (
            "{hero} learned that every master was a beginner once.",
            "Now {he} teaches others how to {skill}, and {he} is very patient.",
            "To learn something new, {he} thought, you must be ready to fail a little.",
            "When others fail, {hero} tells them about that day.",
        ),
        CLOSING,
    ),
)

NEW_FRIEND: Shape = (
    (
        OPENING,
        (
            "{He} had just moved there and knew nobody.",
            "{He} had many toys but nobody to play with.",
            "{His} best friend had moved far away, and {he} was lonely.",
        ),
        (
            "So {he} talked to {his} {colour} {thing}, but the {thing} never answered.",
            "Every day {he} played alone with {his} {colour} {thing}.",
            "Only a(n) {colour} {thing} with {feature} kept {him} company.",
        ),
        ARRIVE,
    ),
    (
        MEET,
        (
            "",
            "{pal} had a(n) {food} and was humming a song.",
            "{pal} was trying to {skill}, but it did not go well.",
            "{pal} was all alone, too, and looked up at the clouds.",
        ),
        (
            "{hero} wanted to say hello, but no word came out of {his} mouth.",
            "{hero} hid behind {landmark} because {he} was too shy to speak.",
            "{hero} looked at {his} feet. What should {he} say?",
        ),
        (
            "Then {his} {thing} fell to the ground, and {pal} picked it up.",
            "At last {he} took a step and held out the {colour} {thing}.",
            "Just then {pal} looked up and saw the {colour} {thing}.",
        ),
        (
            '"What a lovely {thing}!" said {pal}. "[May I try it|Is it yours]?"',
            '"Hello," said {pal}. "I like your {thing}. It has {feature}!"',
            '"Is that a real {thing}?" asked {pal}. "I have never seen a(n) {colour} one."',
        ),
        (
            '"You can use it," said {hero}. "[I will show you how|I love to {use}]."',
            '"My name is {hero}," {he} said softly. "Do you want to play with me?"',
            "{hero} forgot to be shy and told {phim} everything about it.",
        ),
        (
            "They {game} until the sun went down.",
            "First they {game}, and then they shared a(n) {food}.",
            "They had so much fun that they forgot about supper.",
        ),
    ),
    (
        (
            '"Will you come again tomorrow?" asked {hero}. "[Of course|I promise]!" said {pal}.',
            '"Tomorrow I will bring a(n) {food}," said {pal}. "And I will bring the {thing}!"',
            '"I am glad that I met you," said {pal}. "So am I," said {hero}.',
        ),
        (
            "{hero} ran home and told {elder} all about {pal}.",
            "And {hero} was never lonely again.",
            "{hero} learned that one small hello can change a whole week.",
            "The next day they met again, and the day after that, too.",
        ),
        CLOSING,
    ),
)

SHARING: Shape = (
    (
        OPENING,
        HABIT,
        (
            "{Time}, {elder} gave {him} a(n) {food}. It was still a little warm.",
            "{Time}, {he} bought a(n) {food} with {his} last coin.",
            "{Time}, {he} helped {elder} all day and got a(n) {food} for it.",
        ),
    ),
    (
        (
            "{He} carried the {dish} to {place}, where {he} wanted to eat it in peace.",
            "{He} sat down near {landmark}, and {his} mouth watered.",
            "{He} took the {dish} to {place}. {Mood}, and {hero} was hungry.",
        ),
        MEET,
        (
            "{pal} looked at the {dish}, and {phis} stomach growled.",
            "{pal} had not eaten since the day before.",
            '"I dropped my lunch into the water," said {pal}. {Phe} looked {sad}.',
        ),
        (
            "{hero} held the {dish} tightly. It was so small, and it smelled so good.",
            '"It is mine," thought {hero}, but the thought did not taste good.',
            "{hero} turned away and took a bite. Somehow it did not taste right.",
        ),
        (
            'Then {he} broke the {dish} in two. "Half of it is for you," {he} said.',
            '"Would you like some of my {dish}?" {he} asked at last.',
            '"Sit down with me," said {hero}. "There is enough {dish} for two."',
        ),
        (
            '"Really?" asked {pal}, and {phis} eyes began to shine.',
            '"You are very kind," said {pal}, and {phe} ate every crumb.',
            "{pal} smiled from ear to ear and took a big bite.",
        ),
        (
            "Then {pal} reached into {phis} {colour} bag and took out {return_gift}.",
            'The next day {pal} came back with {return_gift}. "This is for you," {phe} said.',
            '"Wait here!" said {pal}. {Phe} ran off and came back with {return_gift}.',
        ),
    ),
    (
        (
            "",
            "They shared that as well, and they {game}.",
            "They ate it all together, and then they {game}.",
            '"Half of it is for you," said {pal}, and they both laughed.',
        ),
        (
            "{hero} learned that food tastes better when you share it.",
            "Half a(n) {dish} and a friend are more than a whole {dish}, {he} thought.",
            "Never before had a(n) {dish} tasted so good.",
            '"Sharing is a funny thing," said {hero}. "I gave half away and I have more."',
        ),
        CLOSING,
    ),
)

OWNING_UP: Shape = (
    (
        OPENING,
        FRIEND,
        (
            "{pal} had a(n) {colour} {thing} with {feature}, and {phe} was proud of it.",
            "{pal} owned a(n) {colour} {thing} with {feature}. {hero} admired it.",
            "The finest thing that {pal} had was a(n) {colour} {thing} with {feature}.",
        ),
    ),
    (
        (
            "{Time}, {pal} left the {thing} {at_place}, and {hero} wanted to {use}.",
            '{Time}, {hero} borrowed the {thing} and took it to {place}. "Take care," said {pal}.',
            "{Time}, when {pal} was not looking, {hero} picked up the {thing}.",
        ),
        (
            "But it slipped from {his} {hands} and broke.",
            "Crack! {He} had stepped on it, and now it was broken.",
            "{He} stumbled near {landmark}, and the {colour} {thing} broke in two.",
        ),
        (
            "{hero} was frightened and hid the pieces {under}.",
            "Nobody had seen it. Quickly {he} hid the {thing} {under}.",
            "{He} pushed the pieces {under} and ran home.",
        ),
        (
            '"Have you seen my {colour} {thing}?" asked {pal}. "No," said {hero}.',
            '"My {thing} is gone," said {pal}, and {phe} looked {sad}. {hero} said nothing.',
            "When {pal} looked for the {thing}, {hero} looked at the ceiling.",
        ),
        (
            "",
            "That night {hero} could not sleep. {His} tummy hurt, and {he} felt {sad}.",
            '"A lie is like a stone in your shoe," {elder} had once said. Now {he} understood.',
            "All day {he} thought about it. Even {his} favourite soup tasted like paper.",
        ),
        (
            '"I broke your {thing}," {he} said the next day. "[I am so sorry|Please forgive me]."',
            'At last {he} went to {pal}. "It was me," {he} said. "I broke it and I hid it."',
            "{He} brought the pieces to {pal} and told {phim} the truth.",
        ),
        (
            '{pal} was quiet for a while. "Thank you for telling me," {phe} said.',
            '"I am sad about the {thing}," said {pal}, "but I am glad that you told me."',
            '"[A thing can be mended|You are more important than a(n) {thing}]," said {pal}.',
        ),
    ),
    (
        (
            "Together they mended it with glue and string.",
            "They took it to {elder}, and together they repaired it.",
            "It took them {days} to mend the {thing}, and they {game} while the glue dried.",
        ),
        (
            "The {thing} was not perfect any more, but the two were better friends than before.",
            "{hero} learned that the truth is heavy for a moment and a lie is heavy for long.",
            "And {hero} felt as light as a feather.",
            '"It looks even better now," said {pal}, and {hero} was {glad}.',
        ),
        CLOSING,
    ),
)

FRIENDSHIP: tuple[Shape, ...] = (LEARNING, NEW_FRIEND, SHARING, OWNING_UP)
