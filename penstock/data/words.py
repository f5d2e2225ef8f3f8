"""A small vocabulary for meaningless texts. Common words: most are one token in any tokenizer."""

_TEXT = """
river mountain garden bridge island forest valley winter spring autumn summer bird horse apple
bread kitchen window table chair lamp clock mirror door floor roof wall stone sand snow rain wind
storm cloud sky moon star sun light shadow fire smoke water ocean lake beach boat ship harbor port
train station road street city village town market shop store bank school teacher student lesson
book page letter word sentence story poem song music piano drum dance paint picture color red blue
green yellow white black brown orange silver gold paper pencil pen desk office computer screen
keyboard phone message number code signal engine wheel car truck bus bicycle plane airport ticket
travel map north south east west left right front back top bottom inside outside near far early
late morning noon evening night day week month year hour minute second moment past future history
memory dream idea thought question answer reason plan project team leader member friend neighbor
family mother father sister brother child baby uncle guest doctor nurse patient hospital medicine
health body head face eye ear hand arm foot heart mind voice smile sleep walk run jump swim climb
drive ride fly carry hold push pull open close start stop begin finish build repair clean wash
cook bake eat drink taste smell touch hear listen see watch read write draw count measure weigh
cut mix add share give take send receive bring keep find lose search learn teach know think
believe hope wish want need like enjoy laugh cry speak talk tell ask reply call invite visit meet
wait follow lead help thank choose decide agree change grow move stay return arrive leave enter
pass cross turn fall rise happy sad calm angry brave shy kind gentle strong weak quick slow loud
quiet bright dark warm cold hot cool dry wet soft hard smooth rough heavy thin thick wide narrow
long short tall deep high low large small great little old young new fresh sweet salty bitter
simple clear cheap rich poor safe busy free full empty ready common rare strange famous honest
careful clever farm field grass tree leaf root seed flower fruit tomato potato carrot onion rice
bean corn milk cheese butter sugar salt pepper coffee tea juice soup cake dinner lunch breakfast
plate cup glass spoon fork knife bottle basket box bag coat shirt shoe hat button pocket wool
cotton leather iron copper wood metal plastic
"""
WORDS = tuple(_TEXT.split())
