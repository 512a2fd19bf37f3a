"""Word tables of the story grammar: characters, places, things and events.

One decision: a story draws one row from every table and binds its fields together, so that all
sentences of a story mention the same things. A field may hold placeholders (`{he}`) and
alternatives (`[a|b]`); story_grammar.py describes them.
"""

Row = tuple[str, ...]
Table = tuple[Row, ...]

# fmt: off
# Pronouns refer only to the hero and the friend, who have different ones: none is ambiguous.
PRONOUNS: dict[str, Row] = {
    "she": ("she", "her", "her", "herself"),
    "he": ("he", "him", "his", "himself"),
}
CHILD = {"she": "girl", "he": "boy"}

NAMES: dict[str, Row] = {
    "she": (
        "Mia", "Lily", "Zoe", "Nora", "Ruby", "Clara", "Ivy", "Rosa", "Luna", "Hazel", "Amara",
        "Anna", "Ella", "Tess", "Molly", "Yuki", "Priya", "Leila", "Juno", "Greta", "Mabel",
        "Pearl", "Sally", "Maya",
    ),
    "he": (
        "Ben", "Tom", "Max", "Leo", "Sam", "Finn", "Otto", "Jack", "Theo", "Milo", "Hugo",
        "Oscar", "Felix", "Toby", "Jonah", "Arlo", "Rufus", "Gus", "Emil", "Noah", "Kofi",
        "Ravi", "Omar", "Diego",
    ),
}

ANIMALS: Row = (
    "fox", "rabbit", "bear", "mouse", "hedgehog", "squirrel", "otter", "badger", "kitten", "puppy",
    "mole", "beaver", "raccoon", "panda", "hamster", "wolf",
)

TRAITS: Row = (
    "curious", "cheerful", "quiet", "brave", "clever", "gentle", "busy", "eager", "honest",
    "playful", "stubborn", "dreamy", "careful", "lively", "impatient", "merry", "adventurous",
)
FRIEND_TRAITS: Row = (
    "friendly", "patient", "funny", "thoughtful", "helpful", "sleepy", "jolly", "wise", "shy",
    "easygoing", "kind", "polite", "energetic", "talkative",
)

SINGLES: dict[str, Row] = {
    "home": (
        "in a small cottage by the river", "in a round house on a green hill",
        "at the edge of a sleepy village", "in a narrow house at the end of the lane",
        "in a warm attic above the bakery", "in a blue house near the sea",
        "on a small farm between two hills", "in a wooden house beside a lake",
        "in a tall house with a crooked chimney", "in an old mill beside a stream",
        "next to a lighthouse on the coast", "in a town full of bells and bridges",
    ),
    "habit": (
        "hum old songs", "collect round stones", "watch the boats go by", "ask questions",
        "draw pictures in the mud", "eat warm bread with butter", "jump over puddles",
        "tell long jokes", "look at the stars", "build towers out of sticks", "follow ants",
        "make up silly songs", "count the clouds", "run down the hill", "sit by the window",
    ),
    "time": (
        "one day", "one morning", "one afternoon", "one Saturday", "early one morning",
        "one quiet Sunday", "after breakfast one day", "on the last day of the week",
        "one Tuesday", "on a day like any other",
    ),
    "elder": (
        "the old tortoise", "Grandma", "Grandpa", "the baker", "the old gardener", "the miller",
        "the librarian", "the beekeeper", "the clockmaker", "the old fisherman", "Aunt Agnes",
    ),
    "colour": (
        "red", "blue", "green", "yellow", "purple", "orange", "silver", "golden", "white", "pink",
        "striped", "spotted", "emerald",
    ),
    "small": ("little", "small", "young", "tiny"),
    "sad": ("sad", "upset", "unhappy", "gloomy", "troubled", "miserable"),
    "glad": ("happy", "glad", "delighted", "proud", "pleased", "full of joy"),
    "game": (
        "told each other riddles", "made shadow animals on the wall", "played a guessing game",
        "sang every song they knew", "made up a story about a sleepy dragon",
        "built a castle out of old boxes", "drew a map of an island that did not exist",
        "pretended to be captains of a ship", "put on a play about a lazy king",
    ),
    "days": ("three days", "a week", "ten days", "two long weeks", "many days"),
    "sky": (
        "The sun was shining.", "A light breeze was blowing.", "The air smelled of [grass|rain].",
        "Somewhere a bird was singing.", "The sky was [clear and blue|full of small white clouds].",
    ),
}

# Tables of several columns: the names of the columns, then the rows.
COLUMNS: dict[Row, Table] = {
    ("thing", "feature", "use"): (
        ("kite", "a long tail of ribbons", "fly it above the hill"),
        ("ball", "a bright star on its side", "bounce it against the wall"),
        ("drum", "a deep and merry sound", "beat it from morning to night"),
        ("boat", "a sail made of paper", "float it on the pond"),
        ("hat", "a feather on top", "wear it everywhere"),
        ("scarf", "tiny bells at both ends", "wear it on cold days"),
        ("whistle", "a tone like a bird", "blow it on the way to town"),
        ("lantern", "a window of coloured glass", "carry it through the garden at night"),
        ("umbrella", "a handle shaped like a duck", "twirl it in the rain"),
        ("bucket", "a handle made of rope", "fill it with smooth stones"),
        ("book", "pictures of faraway lands", "read it under the blanket"),
        ("bell", "a sweet and gentle sound", "ring it before supper"),
        ("wagon", "four squeaky wheels", "pull it up and down the lane"),
        ("puppet", "two shiny button eyes", "make it dance and bow"),
        ("top", "a spiral painted on it", "make it spin on the table"),
        ("flute", "six neat holes", "play it by the window"),
        ("compass", "a needle that never stood still", "hold it up and lead the way"),
        ("teapot", "a lid that rattled", "pour pretend tea for the neighbours"),
        ("cape", "a button shaped like a moon", "wear it like a knight"),
        ("marble", "a swirl like a small storm inside", "roll it along the floor"),
    ),
    ("place", "at_place", "mood", "under", "landmark"): (
        ("the park", "in the park", "the swings creaked", "under a bench", "the slide"),
        ("the forest", "in the forest", "the leaves whispered", "under a fern", "the oak tree"),
        ("the beach", "on the beach", "the waves rolled in", "under a towel", "the tallest rock"),
        ("the market", "at the market", "it smelled of plums", "under a table", "the fruit cart"),
        ("the meadow", "in the meadow", "the flowers nodded", "under a leaf", "the haystack"),
        ("the orchard", "in the orchard", "the apples shone", "under a ladder", "the old wall"),
        ("the garden", "in the garden", "the bees hummed", "under a flowerpot", "the shed"),
        ("the harbour", "at the harbour", "the gulls cried", "under a net", "the fishing boat"),
        ("the hill", "on the hill", "the grass was tall", "under a flat stone", "the windmill"),
        ("the lake", "by the lake", "the water was still", "under a log", "the boathouse"),
        ("the library", "in the library", "it was very quiet", "under a chair", "the tall shelf"),
        ("the playground", "at the playground", "the sand was warm", "under a plank", "the tower"),
        ("the station", "at the station", "the clock ticked", "under a suitcase", "the old train"),
        ("the castle", "at the castle", "moss grew on the walls", "under a stair", "the gate"),
    ),
    ("skill", "fail", "tip", "win"): (
        ("whistle", "only a puff of air came out", "Make your lips as round as a pea",
         "a clear, bright note flew out"),
        ("swim", "{he} swallowed water and paddled back to the shore",
         "Kick slowly and keep your chin up", "{he} crossed the whole pond without stopping"),
        ("ride a bicycle", "the bicycle tipped over into a bush",
         "Look at the road and not at the wheel", "the wheels rolled straight down the lane"),
        ("tie a knot", "the string slid apart like a noodle",
         "Make a loop and lead the end around it", "the knot held tight"),
        ("bake bread", "the loaf came out as hard as a brick",
         "Let the dough rest before you bake it", "the loaf rose high and golden"),
        ("jump rope", "the rope caught {his} feet", "Jump when the rope taps the ground",
         "{he} jumped twenty times in a row"),
        ("juggle", "all three apples rolled across the floor",
         "Begin with two apples and throw them high", "three apples went round in the air"),
        ("draw a horse", "the horse looked like a potato with legs",
         "Start with the big shapes", "the horse seemed ready to gallop off the page"),
        ("climb the tall tree", "{he} slid down before the first branch",
         "Test each branch before you trust it", "{he} sat at the top and saw the whole valley"),
        ("skate", "{his} legs went in two directions", "Bend your knees and lean a little",
         "{he} glided across the ice like a swan"),
        ("play the fiddle", "it screeched like a gate", "Move the bow slowly and softly",
         "a gentle tune filled the room"),
        ("read", "the letters hopped about like fleas", "Say each sound and then put them together",
         "whole words stepped out of the page"),
        ("sew", "the thread slipped out of the needle", "Hold the cloth flat and do not hurry",
         "a neat row of stitches ran along the cloth"),
        ("dance", "{he} stepped on everyone's toes", "Count to four and follow the drum",
         "{his} feet found the beat"),
        ("row a boat", "the boat went round in circles", "Pull both oars at the same time",
         "the boat cut through the water like a fish"),
    ),
    ("weather", "storm", "noise", "after"): (
        ("rain", "dark clouds rolled in and rain began to fall", "the rain drummed on the roof",
         "a rainbow stretched across the sky"),
        ("wind", "a strong wind came up and carried the napkins away",
         "the wind rattled the shutters", "the air was calm and the leaves lay in golden heaps"),
        ("snow", "snow began to fall in thick, soft flakes", "the snow climbed up the windows",
         "the whole world was white and silent"),
        ("fog", "a grey fog crept in and hid the path", "the fog pressed against the glass",
         "the sun came through and every cobweb sparkled"),
        ("hail", "hard little balls of hail came down from the sky",
         "the hail danced on the roof", "the ground glittered as if someone had spilled pearls"),
        ("thunder", "thunder growled behind the hills", "the thunder boomed and rolled",
         "the evening smelled fresh and the frogs began to sing"),
    ),
    ("food", "dish", "return_gift"): (
        ("honey cake", "cake", "a handful of cherries"),
        ("apple pie", "pie", "a jar of plum jam"),
        ("cheese sandwich", "sandwich", "a cup of cool lemonade"),
        ("blueberry muffin", "muffin", "a pocketful of nuts"),
        ("warm bun", "bun", "a slice of melon"),
        ("oat cookie", "cookie", "two sweet carrots"),
        ("pear tart", "tart", "a bag of roasted chestnuts"),
        ("orange", "orange", "a basket of raspberries"),
        ("pancake", "pancake", "a spoonful of golden honey"),
        ("egg roll", "roll", "a ripe peach"),
    ),
    ("sound", "clue", "cause", "kindness"): (
        ("a tapping", "a few wet leaves", "a moth that wanted to reach the light",
         "opened the window and let it rest beside the lamp"),
        ("a squeaking", "a trail of crumbs", "a tiny bat with a very large biscuit",
         "brought it a thimble of milk"),
        ("a humming", "a smear of honey", "a bee that had lost its way",
         "carried it back to the flowers"),
        ("a rattling", "a row of muddy dots", "a hen with its head in a tin can",
         "pulled the can off as gently as they could"),
        ("a soft crying", "a tuft of white wool", "a lost lamb behind a basket",
         "wrapped it in a warm towel"),
        ("a splashing", "a line of shiny drops", "a frog that was taking a bath in the sink",
         "took it back to the pond"),
        ("a flapping", "one long feather", "a young owl that was learning to fly",
         "cheered until it landed safely"),
        ("a scratching", "a heap of nutshells", "a blue jay that was hiding its winter store",
         "left a bowl of nuts for it"),
        ("a jingling", "a piece of broken string", "a goat that had run away with a bell",
         "led it home to the farm"),
    ),
    ("creature", "trouble", "rescue", "favour"): (
        ("bee", "had fallen into a puddle", "held out a leaf and lifted it onto a dry stone",
         "led them to a patch of wild strawberries"),
        ("turtle", "was lying on its back", "turned it over and set it on the grass",
         "carried them across the stream, one after the other"),
        ("sparrow", "had a thread around its foot", "untied the thread with great care",
         "sang at their window every morning"),
        ("frog", "could not get out of a deep bucket", "tipped the bucket until it hopped out",
         "showed them the best place to catch the evening sun"),
        ("butterfly", "was caught in a spider's web", "freed its wings, thread by thread",
         "danced in front of them all the way home"),
        ("lamb", "was stuck between two boards", "pushed the boards apart",
         "let them stroke its soft wool"),
        ("crab", "was trapped inside a bottle", "rolled the bottle until it could climb out",
         "brought them a shell that shone like the moon"),
        ("duckling", "could not find its mother", "followed the quacking to the reeds",
         "swam three circles around them to say thank you"),
        ("snail", "was drying out on a hot stone", "carried it to a cool, wet leaf",
         "left a silver path that looked like a letter"),
    ),
    ("seed", "plant", "harvest"): (
        ("pumpkin seed", "vine", "a pumpkin as big as a wheelbarrow"),
        ("sunflower seed", "stalk", "a sunflower taller than the roof"),
        ("magic bean", "beanstalk", "a hundred beans as blue as the sky"),
        ("apple seed", "sapling", "a single apple, red and round"),
        ("acorn", "sprout", "a little oak tree with seven leaves"),
        ("melon seed", "vine", "a melon so heavy that two had to carry it"),
        ("tulip bulb", "bud", "a tulip with petals like flames"),
    ),
    ("gift", "material", "mishap", "mend"): (
        ("birdhouse", "thin boards", "the roof fell off", "pinned the roof down with wooden pegs"),
        ("necklace", "tiny shells", "the string snapped", "used a stronger string from a guitar"),
        ("picture frame", "smooth driftwood", "one corner cracked", "tied the corner with twine"),
        ("crown", "gold paper", "it tore down the middle", "hid the tear under a paper star"),
        ("music box", "an old clock", "the spring flew out", "wound it up again with a hairpin"),
        ("quilt", "bits of old cloth", "a hole opened in it", "sewed a patch like a heart over it"),
        ("toy ship", "a piece of cork", "the mast broke", "made a new mast from a pencil"),
    ),
    ("contest", "course", "bend", "obstacle", "prize"): (
        ("sack race", "across the meadow", "the haystack", "tripped over a root",
         "a basket of pears"),
        ("boat race", "down the river", "the stone bridge", "got tangled in the reeds",
         "a shiny brass bell"),
        ("sled race", "down the north hill", "the tall pine", "tumbled into a snowbank",
         "a pair of woollen socks"),
        ("running race", "around the lake", "the boathouse", "slipped on a wet leaf",
         "a big blue ribbon"),
        ("egg race", "through the village", "the fountain", "stumbled and twisted a foot",
         "a chocolate cake"),
        ("wheelbarrow race", "along the orchard wall", "the old gate", "crashed into a fence",
         "a small silver cup"),
    ),
    ("fear", "looked", "truth"): (
        ("the dark", "a giant seemed to stand in the corner", "a coat on a hook"),
        ("the cellar", "two eyes seemed to glow on the shelf", "a pair of jam jars"),
        ("the attic", "a ghost seemed to float under the roof", "a sheet on a line"),
        ("the night", "a claw seemed to scratch at the wall", "a rose bush in the wind"),
        ("the cave", "a monster seemed to growl far inside", "an echo of the stream"),
        ("the deep woods", "a dragon seemed to lie across the path", "a fallen, mossy tree"),
    ),
    ("map_home", "treasure", "wisdom"): (
        ("inside a bottle", "a letter with a string of beads", "The best treasure is the way here"),
        ("between the pages of a book", "a brass telescope", "Whoever looks far finds much"),
        ("under a loose floorboard", "a heap of painted stones", "Take one and leave one"),
        ("in the pocket of an old coat", "a tiny golden key", "Some doors are opened by a smile"),
        ("behind a picture", "a flute made of bone", "A song grows when it is shared"),
        ("in a dusty jar", "a bag of flower seeds", "Plant what you find"),
    ),
}
# fmt: on
