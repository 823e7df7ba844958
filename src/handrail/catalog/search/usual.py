"""Which words requests and tools commonly use: the background against which a particular word is telling.

A model's vectors of requests all share the direction "somebody asks for something", those of tools "this does
something". Subtracted, what is left tells one from another, and a tool that is a little like every request (one that
praises itself as good for everything) loses that advantage. Any embedder's background is made of these texts.

What other catalogues have says when nothing here fits: a request that lies nearer to a tool that is not here than to any
that is, asks for that one. For the local model a thousand such are kept as vectors, made by ``bench/finding/elsewhere.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder import Vectors


def elsewhere() -> Vectors:
    """The local model's vectors of tools as there are everywhere, one a row, each of length 1."""
    import numpy

    with Path(__file__).with_name("elsewhere.npy").open("rb") as file:
        rows: Any = numpy.load(file, allow_pickle=False).astype(numpy.float32)
    return rows / numpy.linalg.norm(rows, axis=1, keepdims=True)


REQUESTS = (
    "What's the weather going to be like tomorrow?",
    "Can you find me a good place to eat nearby?",
    "I need to send an email to my colleague.",
    "Calculate the result for these numbers.",
    "Please book a room for two nights.",
    "Show me the latest news about the economy.",
    "How much is this stock worth today?",
    "Create a new file and write the report into it.",
    "Remind me to call my sister at five.",
    "Translate this sentence into another language.",
    "I want to buy a new phone within my budget.",
    "Get the details of the order with this ID.",
    "Could you recommend a movie for tonight?",
    "List all open tasks of the project.",
    "Search the web for information about this topic.",
    "What is the fastest way to get there?",
    "Turn on the lights in the living room.",
    "Delete the old records from the database.",
    "Summarize this document for me.",
    "Help me plan a trip for next weekend.",
    "Analyze the data and draw a chart.",
    "Check whether the server is running.",
    "Who won the game last night?",
    "I'd like to learn more about a healthy diet.",
    "Convert this amount to another currency.",
    "Update the customer's address and phone number.",
    "Run the tests and tell me what fails.",
    "Play some relaxing music, please.",
    "I'm looking for a job in marketing.",
    "Generate an image of a cat on a beach.",
    "Evaluate the effect of the new policy on the population.",
    "Retrieve the patient's medical history.",
    "Write a short story about a dragon.",
    "Compare the prices of these two products.",
    "What are the opening hours of the museum?",
    "Schedule a meeting with the team on Monday.",
)

TOOLS = (
    "get weather: Returns the current weather for a location.",
    "search restaurants: Find restaurants near a place by cuisine and rating.",
    "send email: Sends an e-mail to one or more recipients.",
    "calculate sum: Adds numbers and returns the result.",
    "book hotel: Reserve a hotel room for given dates.",
    "get news: Retrieve recent news articles about a topic.",
    "stock price: Get the latest price of a stock by its symbol.",
    "write file: Create a file or overwrite its content.",
    "create reminder: Set a reminder for a given time.",
    "translate text: Translate text from one language to another.",
    "search products: Search a shop for products within a price range.",
    "get order: Retrieve an order by its identifier.",
    "recommend movies: Suggest films by genre and year.",
    "list issues: List the issues of a repository.",
    "web search: Search the internet and return the results.",
    "get directions: Get a route between two places.",
    "control device: Switch a smart home device on or off.",
    "delete record: Delete a row from a table.",
    "summarize document: Produce a summary of a document.",
    "plan trip: Create an itinerary for a destination.",
    "plot data: Draw a chart from a data set.",
    "server status: Check the status of a server.",
    "sports results: Get the results of recent matches.",
    "nutrition facts: Look up the calories and nutrients of a food.",
    "convert currency: Convert an amount between currencies.",
    "update customer: Change the details of a customer.",
    "run tests: Run a project's tests and report failures.",
    "play music: Play a song or playlist.",
    "job search: Find job openings by title and place.",
    "generate image: Generate a picture from a description.",
    "evaluate policy: Evaluate the effectiveness of a policy by an indicator.",
    "get patient history: Retrieve the medical records of a patient.",
    "generate story: Write a story from a prompt.",
    "compare products: Compare features and prices of products.",
    "opening hours: Get the opening hours of a place.",
    "create event: Add an event to a calendar.",
)
