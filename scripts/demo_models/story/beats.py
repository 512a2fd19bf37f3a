"""Beats that story shapes share: openings, encounters, closings.

One decision: a shape is a tuple of paragraphs, a paragraph a tuple of beats, and a beat the
alternative sentences for one point of the story; "" omits the beat.
"""

Beat = tuple[str, ...]
Paragraph = tuple[Beat, ...]
Shape = tuple[Paragraph, ...]

OPENING: Beat = (
    "Once upon a time there was a(n) {trait} {kind} named {hero} who lived {home}.",
    "Once there was a(n) {trait} {small} {kind} called {hero}, who lived {home}.",
    "{hero} was a(n) {trait} {small} {kind} who lived {home}.",
    "Long ago, {home}, there lived a(n) {trait} {kind} named {hero}.",
    "{Home} lived a(n) {trait} {small} {kind} whose name was {hero}.",
    "This is the story of {hero}, a(n) {trait} {kind} who lived {home}.",
    "A(n) {small} {kind} named {hero} lived {home}. {He} was [very|always|rather] {trait}.",
)

HABIT: Beat = (
    "",
    "{He} loved to {habit}.",
    "More than anything, {he} liked to {habit}.",
    "[Everyone knew|The neighbours said] that {he} loved to {habit}.",
    "When there was nothing to do, {he} liked to {habit}.",
    "In summer {he} liked to {habit}, and in winter {he} liked to sleep.",
)

ARRIVE: Beat = (
    "{Time}, {hero} went to {place}.",
    "{Time}, {he} [walked|ran|skipped] all the way to {place}.",
    "{Time}, {he} decided to spend some hours {at_place}.",
    "{Time}, {hero} set out for {place} with a [song|sandwich|map] in {his} pocket.",
)

MOOD: Beat = (
    "",
    "",
    "It was a [fine|mild|bright] day, and {mood}.",
    "[Everything was peaceful|The air was sweet], and {mood}.",
    "{He} stopped to listen. {Mood}, and far away a dog barked.",
)

MEET: Beat = (
    "There {he} met a(n) {ptrait} {pkind} named {pal}.",
    "[Just then|Soon] a(n) {ptrait} {pkind} named {pal} came along.",
    "A(n) {ptrait} {pkind} called {pal} was [sitting|standing|resting] near {landmark}.",
    "Near {landmark} {he} saw {pal}, a(n) {ptrait} {pkind} with [muddy feet|a big smile].",
)

COMES_TO_HELP: Beat = (
    "[Just then|At that moment] a(n) {ptrait} {pkind} named {pal} came by.",
    "A(n) {ptrait} {pkind} named {pal} [heard|saw] {him} and came closer.",
    "Then {he} noticed {pal}, a(n) {ptrait} {pkind}, who was sitting near {landmark}.",
    "From behind {landmark} came a(n) {ptrait} {pkind} called {pal}.",
)

FRIEND: Beat = (
    "{His} best friend was {pal}, a(n) {ptrait} {pkind} [from across the road|who lived nearby].",
    "Next door lived {his} friend {pal}, a(n) {ptrait} {pkind}.",
    "{He} had a friend named {pal}, who was a(n) {ptrait} {pkind}.",
    "Almost every day {he} played with {pal}, a(n) {ptrait} {pkind}.",
)

THANKS: Beat = (
    '"Thank you, {pal}!" said {hero}. "[I could not have done it alone|You are a true friend]."',
    '"Thank you!" cried {hero}, and {he} hugged {pal}.',
    '{hero} took {pal} by the hand. "[I will never forget this|You helped me a lot]," {he} said.',
    '"How can I thank you?" asked {hero}. "[Just smile|Come and play tomorrow]," said {pal}.',
)

CLOSING: Beat = (
    "",
    "From that day on, {hero} and {pal} were [the best of friends|never far apart].",
    "That night {hero} fell asleep with a smile.",
    "And that was the end of a [good|long|wonderful] day.",
    "Then {hero} and {pal} went home, and both of them were {glad}.",
    "And whenever {hero} thought of that day, {he} smiled.",
    "If you ever pass {place}, you may still hear {hero} and {pal} laugh.",
    "When {elder} heard about it, there was [warm milk|soup|cake] for everyone.",
)
