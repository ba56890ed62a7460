// SPDX-License-Identifier: Apache-2.0
const root=document.documentElement;root.classList.add('js');
const tip=document.createElement('div');tip.id='tip';tip.hidden=true;document.body.append(tip);
const show=(event,text)=>{tip.textContent=text;tip.hidden=false;
 const x=event.clientX,y=event.clientY,w=tip.offsetWidth,h=tip.offsetHeight;
 tip.style.left=Math.max(4,x+14+w>innerWidth?x-w-14:x+14)+'px';
 tip.style.top=Math.max(4,y+16+h>innerHeight?y-h-10:y+16)+'px'};
const steps=JSON.parse(document.getElementById('steps').textContent);
const at=(event,box,count)=>Math.max(0,Math.min(count-1,
 Math.floor((event.clientX-box.left)/box.width*count)));
document.querySelectorAll('.pick select').forEach(select=>{
 const panels=document.querySelectorAll('[data-panel='+select.name+']');
 const pick=()=>panels.forEach((panel,i)=>panel.hidden=i!==select.selectedIndex);
 select.addEventListener('change',pick);pick()});
document.querySelectorAll('.lines[data-values]').forEach(figure=>{
 const values=JSON.parse(figure.dataset.values),plot=figure.querySelector('.plot');
 const names=[...figure.querySelectorAll('.legend b')].map(name=>name.textContent);
 const notes=JSON.parse(figure.dataset.notes),columns=steps[figure.dataset.axis];
 const cross=document.createElementNS('http://www.w3.org/2000/svg','line');
 cross.setAttribute('class','cross');cross.setAttribute('y1','0');cross.setAttribute('y2','100%');
 plot.addEventListener('mousemove',event=>{
  const count=columns.length,i=at(event,plot.getBoundingClientRect(),count);
  const x=(i+.5)/count*100+'%';cross.setAttribute('x1',x);cross.setAttribute('x2',x);
  plot.append(cross);show(event,'step '+columns[i]+'\n'
   +names.map((name,k)=>name+'  '+(values[k][i]===null?'unknown':values[k][i].toFixed
    ?values[k][i].toFixed(2)+'\u00d7':values[k][i])).join('\n')
   +(notes[i]?'\n'+notes[i]:''))});
 plot.addEventListener('mouseleave',()=>{cross.remove();tip.hidden=true})});
const pixels=image=>{const canvas=document.createElement('canvas');
 canvas.width=image.naturalWidth;canvas.height=image.naturalHeight;
 const pen=canvas.getContext('2d');pen.drawImage(image,0,0);
 return pen.getImageData(0,0,canvas.width,canvas.height)};
const colour=(data,i)=>data[4*i]<<16|data[4*i+1]<<8|data[4*i+2];
const scales={};
const scale=name=>scales[name]??=(()=>{const ramp=document.getElementById(name);
 const found=pixels(ramp),values=JSON.parse(ramp.dataset.values);
 return {unit:ramp.dataset.unit,value:new Map(values.map((v,i)=>[colour(found.data,i),v]))}})();
const held=figure=>{const shelves=JSON.parse(figure.dataset.held),high=+figure.dataset.row;
 return y=>{const shelf=shelves.findLast(one=>one[1]<=y);
  return shelf?[shelf[2+Math.floor((y-shelf[1])/high)],shelf[0]]:[]}};
addEventListener('beforeprint',()=>document.querySelectorAll('details')
 .forEach(one=>one.open=true));
document.querySelectorAll('.heat').forEach(figure=>{
 const image=figure.querySelector('img'),expertAt=held(figure);let found=null;
 image.addEventListener('mousemove',event=>{
  const {unit,value}=scale(figure.dataset.ramp);found=found||pixels(image);
  const box=image.getBoundingClientRect(),i=at(event,box,found.width);
  const y=Math.floor((event.clientY-box.top)/box.height*found.height);
  const [expert,home]=expertAt(y);
  if(expert===undefined){tip.hidden=true;return}
  const there=value.get(colour(found.data,y*found.width+i));
  show(event,'expert '+expert+', of EP rank '+home+'\nstep '+steps.heat[i]+'\nabout '
   +there.toFixed(2)+unit)});
 image.addEventListener('mouseleave',()=>tip.hidden=true)});
document.querySelectorAll('.map').forEach(figure=>{
 const image=figure.querySelector('img'),expertAt=held(figure);
 const copied=JSON.parse(figure.dataset.copied),added=JSON.parse(figure.dataset.added);
 const passes=figure.dataset.passes;
 image.addEventListener('mousemove',event=>{
  const box=image.getBoundingClientRect(),cell=at(event,box,figure.dataset.cells);
  const [expert,home]=expertAt(event.clientY-box.top);
  if(expert===undefined){tip.hidden=true;return}
  const late=(added[expert]||[]).find(one=>one[0]===cell),cells=copied[expert]
   .concat((added[expert]||[]).map(one=>one[0]));
  const what=cell===home?'home':late?'copy made after the gate'
   +(passes>1?', in '+late[1]+' of '+passes+' passes':''):cells.includes(cell)?'copy':'no copy';
  show(event,'expert '+expert+', EP rank '+cell+': '+what+'\nhome: EP rank '+home
   +(cells.length?', copied to '+cells.join(', '):', not copied'))});
 image.addEventListener('mouseleave',()=>tip.hidden=true)});
document.addEventListener('mouseover',event=>{
 const title=event.target.querySelector&&event.target.querySelector(':scope>title');
 if(title){event.target.dataset.tip=title.textContent;title.remove()}
 if(event.target.dataset&&event.target.dataset.tip)show(event,event.target.dataset.tip)});
document.addEventListener('mouseout',event=>{
 if(event.target.dataset&&event.target.dataset.tip)tip.hidden=true});
