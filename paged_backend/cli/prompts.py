"""The demo's prompts: sixteen everyday requests, from six words to several paragraphs."""

from __future__ import annotations

PROMPTS = (
    "What is the capital of Portugal?",
    "Name three fruits that are red.",
    "Translate into French: Good morning, where is the railway station?",
    "Write a two-line poem about a lighthouse in winter.",
    "Is 91 a prime number? Answer yes or no, and give the reason in one sentence.",
    "Explain to a ten-year-old why the sky is blue on a clear day but red at sunset.",
    "I have eggs, spinach, half an onion, some stale bread and a little cheese. Suggest one dinner I could cook in "
    "twenty minutes, and list the steps in order.",
    "Write a short, friendly email to my neighbour. Their dog got into my garden again and dug up the tulips. I am not "
    "angry, but I would like them to repair the gap in the fence before the weekend.",
    "Here is a Python function:\n\n"
    "def mean(values):\n"
    "    total = 0\n"
    "    for value in values:\n"
    "        total += value\n"
    "    return total / len(values)\n\n"
    "What happens when the list is empty? Say how you would change the function so that the caller gets a clear error.",
    "Compare travelling by night train with travelling by plane between two cities about a thousand kilometres apart. "
    "Consider the price, the time door to door, how rested one arrives, and the effect on the climate. Finish with a "
    "recommendation for a family with two small children and a lot of luggage.",
    "Summarise this message in one sentence.\n\n"
    "Hi all, a quick note about Thursday. The plumber can only come between nine and eleven, so the water in the whole "
    "building will be off during that time. Please fill a kettle or a jug beforehand. The washing machines in the "
    "cellar must not run that morning, because the drain will be open. If you need the lift, it keeps working. Should "
    "anything still leak on Friday, write to me directly and not to the plumber, since every visit is billed to all of "
    "us. Thanks for your patience, and sorry for the short notice.",
    "Correct the spelling and the grammar of this text, and change nothing else.\n\n"
    "Last sumer we has rented a small boat and sailed along the cost for five days. The wether was mostly good, only "
    "on the third day it rained so hard that we stays in the harbour and played cards untill midnight. My sister, who "
    "never sailed before, learned to steer very quick. On the last evening we seen dolphins, there was at least six of "
    "them, and they followed us for nearly a hour. I would go again tomorow if I could.",
    "Read the story and answer the question at its end.\n\n"
    "The old clockmaker kept two ledgers. In the first he wrote down what each customer owed him, and he showed it to "
    "anyone who asked. In the second, which he kept under the floor, he wrote down what he owed to others: a jar of "
    "honey from the baker's widow, an afternoon's help with the roof, a kind word when his brother died. When the mill "
    "closed and half the village could not pay, he burned the first ledger in the square, in front of everyone. People "
    "said that he had gone mad. The next morning his workshop was full. Nobody had come about a clock. The widow "
    "brought bread, the carpenter brought wood, and a boy whom he hardly knew swept the floor without being asked. The "
    "clockmaker went to the corner, lifted the loose board, and began to write.\n\n"
    "What does the second ledger mean to the clockmaker, and why does he keep it hidden?",
    "You are helping me to prepare a lesson for adults who are new to computers. These are my notes.\n\n"
    "A file is a piece of information with a name. A folder is a place where files are kept together, and a folder may "
    "hold other folders. Deleting a file usually moves it to the bin, from which it can be taken back until the bin is "
    "emptied. Copying a file makes a second one that lives on its own: changing the copy does not change the original. "
    "Moving a file changes where it is kept, and there is still only one of it. A shortcut is neither a copy nor the "
    "file itself, it only points to it, and it stops working when the file is moved or deleted. A backup is a copy "
    "kept in another place, best on another device, so that one accident cannot destroy both.\n\n"
    "Learners most often confuse copying with moving, and they believe that a shortcut is a backup. Write three "
    "exercises that let them discover the difference by themselves. For each, say what they need, what they do, and "
    "what they should notice.",
    "Below are the minutes of a meeting. List every decision that was made, each with the person responsible and the "
    "date by which it is due.\n\n"
    "Present were Amara, Bastien, Chiyo and Dmitri. Amara opened by thanking everyone for the open day, which drew "
    "nearly four hundred visitors, twice as many as last year. Bastien reported that the cost came to a little over "
    "two thousand euros, most of it for the tent. Chiyo asked whether the tent could be bought rather than rented next "
    "time. Nobody knew the price, so Dmitri will ask two suppliers and tell the group by the third of May.\n\n"
    "The second point was the library. The heating has failed three times since January. Chiyo proposed to replace the "
    "old boiler, Bastien would rather repair it once more and wait for the grant. After some discussion the group "
    "agreed to apply for the grant at once and to repair the boiler only if it fails again. Amara will write the "
    "application, and the deadline is the twentieth of April. Bastien will collect the repair bills that it needs and "
    "send them to her by the tenth.\n\n"
    "Last came the summer concert. The choir would like to sing outdoors. Dmitri warned that the square has no power "
    "supply. It was decided to hold the concert in the courtyard, with the square as a wish for another year. Chiyo "
    "talks to the choir this week. The next meeting is on the second of May at seven in the evening.",
    "I am writing a guide to a small museum of everyday things. Here is the text for the first room.\n\n"
    "The room holds chairs. The oldest is a milking stool with three legs, since three legs stand firm on any floor, "
    "however uneven. Beside it is a chair from a village school, its seat polished by some sixty years of children who "
    "could not sit still. The chair with the cane seat belonged to a barber. Look at the arms: the left one is worn "
    "down to the bare wood, the right one is not, and nobody has been able to say why. The folding chair by the window "
    "went around the world on a ship, and came home with a map of the harbours scratched into the underside. Visitors "
    "may lie down on the floor to read it.\n\n"
    "The last chair is the plainest. It comes from a factory that made four thousand of them a day, each like the "
    "other. This one was mended eleven times, with string, with wire, with a bent spoon, with a piece of a bicycle. "
    "The family that gave it to us said that they had never thought of buying another. It was their father's chair, "
    "they said, and when he was gone it still was.\n\n"
    "Write the text for the second room, which holds lamps. Keep the tone: plain, exact and a little fond of its "
    "subject. Describe four lamps, let one of them have a puzzle that nobody has solved, and end with a lamp that is "
    "ordinary. Do not explain what the objects mean; let the reader find it out.",
)
